import fnmatch
import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from docs.kinds import SETTINGS
from tandem.algorithms.registry import ADVANTAGES, POLICY_LOSSES, Registry
from tandem.config.load import load_train_config
from tandem.errors import ConfigErrors
from tests.e2e.keys import ACTOR
from tests.support.runs import Finished, Lab

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    kinds, pluses = len(set(solution_str)) / 6, solution_str.count("+") / 6
    return {"score": kinds + pluses, "kinds": kinds, "pluses": pluses}
"""
"""A reward whose components all differ between samples even for an untrained model."""

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
    """The metrics of a step, and the largest change of each weight."""

    metrics: dict[str, Any]
    moved: dict[str, float]


class Grid:
    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.reward = lab.folder / "reward.py"
        self.reward.write_text(REWARD)
        self.outcome = cache(self._run)

    def words(self, estimator: str, loss: str) -> list[str]:
        names = (f"algorithm.adv_estimator={estimator}", f"{LOSS_MODE}={loss}")
        reward = f"custom_reward_function.path={self.reward}"
        asked = SETTINGS.get(f"advantages/{estimator}", {}) | SETTINGS.get(f"policy_losses/{loss}", {})
        return [*COMMON, reward, *names, *(f"{name}={value}" for name, value in asked.items())]

    def refused(self, estimator: str, loss: str) -> ConfigErrors | None:
        folder = self.lab.folder / f"{estimator}_{loss}"
        try:
            load_train_config(None, [*self.lab.overrides(folder), *self.words(estimator, loss)])
        except ConfigErrors as errors:
            return errors
        return None

    def _run(self, estimator: str, loss: str) -> Outcome:
        folder = self.lab.folder / f"{estimator}_{loss}"
        trainer = self.lab.trainer(folder, *self.words(estimator, loss))
        run = Finished(trainer, folder, [])
        before = run.weights()
        try:
            trainer.fit()
        finally:
            trainer.shutdown()
        moved = {name: float((value - before[name]).abs().max()) for name, value in run.weights().items()}
        return Outcome(run.rows[-1], moved)


@pytest.fixture(scope="module")
def grid(lab):
    return Grid(lab)


def test_a_pair_is_sound_or_refused_with_its_reason(grid):
    verdicts = {
        (estimator, loss): grid.refused(estimator, loss)
        for estimator in ADVANTAGES.names
        for loss in POLICY_LOSSES.names
    }
    refused = {pair: errors for pair, errors in verdicts.items() if errors}
    assert not [str(errors) for pair, errors in refused.items() if not explains(errors, pair)]
    for loss in POLICY_LOSSES.names:
        sound = [estimator for estimator in ADVANTAGES.names if verdicts[estimator, loss] is None]
        assert len(sound) > len(ADVANTAGES.names) / 2, loss


def explains(errors: ConfigErrors, pair: tuple[str, str]) -> bool:
    error, *others = errors.errors
    at_home = error.field in ("algorithm.adv_estimator", LOSS_MODE) and not others
    return at_home and bool(error.remedy) and set(pair) <= set(re.findall(r"\w+", str(error)))


def assert_learns(outcome: Outcome) -> None:
    assert all(math.isfinite(value) for value in outcome.metrics.values() if isinstance(value, float))
    assert outcome.metrics["actor/grad_norm"] > 0
    assert all(0 < distance < 0.1 for distance in outcome.moved.values()), outcome.moved


def watched(registry: Registry[Any], name: str) -> set[str]:
    """Return the metrics that a docstring says to watch."""
    text = (registry.find(name).fn.__doc__ or "").partition("Watch:")[2].partition("Cost:")[0]
    return {metric for metric in re.findall(r"`([\w@/*]+/[\w@/*]+)`", text) if not metric.startswith("val/")}


def unseen(watched: set[str], logged: dict[str, Any]) -> set[str]:
    """Return the watched metrics that were not logged; a name may end with a star."""
    return {metric for metric in watched if not fnmatch.filter(logged, metric)}


@pytest.mark.parametrize("estimator", ADVANTAGES.names)
def test_every_estimator_learns_and_logs_what_it_says_to_watch(grid, estimator):
    loss = next(loss for loss in ("vanilla", *POLICY_LOSSES.names) if not grid.refused(estimator, loss))
    outcome = grid.outcome(estimator, loss)
    assert_learns(outcome)
    assert unseen(watched(ADVANTAGES, estimator), outcome.metrics) == set()


@pytest.mark.parametrize("loss", POLICY_LOSSES.names)
def test_every_loss_learns_and_logs_what_it_says_to_watch(grid, loss):
    outcome = grid.outcome("grpo", loss)
    assert_learns(outcome)
    assert unseen(watched(POLICY_LOSSES, loss), outcome.metrics) == set()
