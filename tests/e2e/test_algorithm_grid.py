"""Every advantage estimator with every policy loss, through the real trainer: a step of two updates on a
tiny model. A pair that makes no sense is refused, with the reason, before anything is built."""

from __future__ import annotations

import fnmatch
import math
import re
from dataclasses import dataclass
from typing import Any

import pytest

from docs.kinds import SETTINGS
from tandem.algorithms.registry import ADVANTAGES, POLICY_LOSSES, Registry
from tandem.errors import ConfigErrors
from tests.e2e.keys import ACTOR
from tests.support.runs import Finished, Lab

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    kinds, pluses = len(set(solution_str)) / 6, solution_str.count("+") / 6
    return {"score": kinds + pluses, "kinds": kinds, "pluses": pluses}
"""
"""Differs between samples even for a model that knows nothing, in all of its parts."""

LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"

COMMON = (
    "actor_rollout_ref.rollout.n=2",
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ACTOR}.optim.weight_decay=0",
    "trainer.total_training_steps=1",
    "trainer.samples_freq=-1",
)


@dataclass(frozen=True)
class Outcome:
    """What a pair came to.

    Attributes:
        refused: the errors, of a pair that is refused.
        metrics: of the step.
        moved: by weight, the largest change.
    """

    refused: ConfigErrors | None
    metrics: dict[str, Any]
    moved: dict[str, float]


class Grid:
    """Runs pairs, each once."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.reward = lab.folder / "reward.py"
        self.reward.write_text(REWARD)
        self._done: dict[tuple[str, str], Outcome] = {}

    def outcome(self, estimator: str, loss: str) -> Outcome:
        if (estimator, loss) not in self._done:
            self._done[estimator, loss] = self._run(estimator, loss)
        return self._done[estimator, loss]

    def _run(self, estimator: str, loss: str) -> Outcome:
        folder = self.lab.folder / f"{estimator}_{loss}"
        names = (f"algorithm.adv_estimator={estimator}", f"{LOSS_MODE}={loss}")
        reward = f"custom_reward_function.path={self.reward}"
        asked = SETTINGS.get(f"advantages/{estimator}", {}) | SETTINGS.get(f"policy_losses/{loss}", {})
        words = (*COMMON, reward, *names, *(f"{name}={value}" for name, value in asked.items()))
        try:
            trainer = self.lab.trainer(folder, *words)
        except ConfigErrors as refused:
            return Outcome(refused, {}, {})
        run = Finished(trainer, folder, [])
        before = run.weights()
        try:
            trainer.fit()
        finally:
            trainer.shutdown()
        moved = {name: float((value - before[name]).abs().max()) for name, value in run.weights().items()}
        return Outcome(None, run.rows[-1], moved)


@pytest.fixture(scope="module")
def grid(lab: Lab) -> Grid:
    return Grid(lab)


@pytest.mark.parametrize("loss", POLICY_LOSSES.names)
@pytest.mark.parametrize("estimator", ADVANTAGES.names)
def test_a_step_moves_the_weights_or_the_pair_is_refused(grid: Grid, estimator: str, loss: str) -> None:
    outcome = grid.outcome(estimator, loss)
    if outcome.refused is not None:
        (error,) = outcome.refused.errors
        assert error.field in ("algorithm.adv_estimator", LOSS_MODE)
        assert error.remedy
        assert {estimator, loss} <= set(re.findall(r"\w+", str(error)))
        return
    assert all(math.isfinite(value) for value in outcome.metrics.values() if isinstance(value, float))
    assert outcome.metrics["actor/grad_norm"] > 0
    assert all(0 < distance < 0.1 for distance in outcome.moved.values()), outcome.moved


@pytest.mark.parametrize("estimator", ADVANTAGES.names)
def test_every_estimator_learns_with_some_loss(grid: Grid, estimator: str) -> None:
    assert any(grid.outcome(estimator, loss).moved for loss in POLICY_LOSSES.names)


@pytest.mark.parametrize("loss", POLICY_LOSSES.names)
def test_every_loss_learns_with_most_estimators(grid: Grid, loss: str) -> None:
    learn = [estimator for estimator in ADVANTAGES.names if grid.outcome(estimator, loss).moved]
    assert len(learn) > len(ADVANTAGES.names) / 2


def watched(registry: Registry[Any], name: str) -> set[str]:
    """The metrics that a docstring says to watch."""
    text = (registry.find(name).fn.__doc__ or "").partition("Watch:")[2].partition("Cost:")[0]
    return {metric for metric in re.findall(r"`([\w@/*]+/[\w@/*]+)`", text) if not metric.startswith("val/")}


def unseen(watched: set[str], runs: list[dict[str, Any]]) -> set[str]:
    """Those that no run has logged; a name may end in a star."""
    seen = set().union(*runs)
    return {metric for metric in watched if not fnmatch.filter(seen, metric)}


@pytest.mark.parametrize("estimator", ADVANTAGES.names)
def test_what_an_estimator_says_to_watch_is_logged(grid: Grid, estimator: str) -> None:
    runs = [grid.outcome(estimator, loss).metrics for loss in POLICY_LOSSES.names]
    assert unseen(watched(ADVANTAGES, estimator), runs) == set()


@pytest.mark.parametrize("loss", POLICY_LOSSES.names)
def test_what_a_loss_says_to_watch_is_logged(grid: Grid, loss: str) -> None:
    runs = [grid.outcome(estimator, loss).metrics for estimator in ADVANTAGES.names]
    assert unseen(watched(POLICY_LOSSES, loss), runs) == set()
