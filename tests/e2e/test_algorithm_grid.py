import fnmatch
import math
import re
from functools import cache
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
"""A reward whose components all differ between samples even for an untrained model."""

LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"

COMMON = "R.n=2 A.ppo_mini_batch_size=2 A.optim.weight_decay=0 steps=1 trainer.samples_freq=-1"


class Grid:
    """A checker of configs and a runner of pairs, which runs each pair once."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.outcome = lab, cache(self._run)

    def words(self, estimator: str, loss: str) -> list[str]:
        names = f"algorithm.adv_estimator={estimator} {LOSS_MODE}={loss}"
        asked = SETTINGS.get(f"advantages/{estimator}", {}) | SETTINGS.get(f"policy_losses/{loss}", {})
        return [COMMON, self.lab.reward(REWARD), names, *(f"{name}={value}" for name, value in asked.items())]

    def refused(self, estimator: str, loss: str) -> ConfigErrors | None:
        try:
            self.lab.config(*self.words(estimator, loss))
        except ConfigErrors as errors:
            return errors
        return None

    def _run(self, estimator: str, loss: str) -> tuple[dict[str, Any], dict[str, float]]:
        """Return the metrics of a step, and the largest change of each weight."""
        folder = self.lab.folder / f"{estimator}_{loss}"
        trainer = self.lab.trainer(folder, *self.words(estimator, loss))
        run = Finished(trainer, folder, [])
        before = run.weights()
        try:
            trainer.fit()
        finally:
            trainer.shutdown()
        moved = {name: float((value - before[name]).abs().max()) for name, value in run.weights().items()}
        return run.rows[-1], moved


@pytest.fixture(scope="module")
def grid(lab):
    return Grid(lab)


@pytest.mark.slow
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


def unseen(registry: Registry[Any], name: str, logged: dict[str, Any]) -> list[str]:
    """Return the metrics that a docstring says to watch, and that were not logged; a star may end a name."""
    text = (registry.find(name).fn.__doc__ or "").partition("Watch:")[2].partition("Cost:")[0]
    watched = re.findall(r"`([\w@/*]+/[\w@/*]+)`", text)
    return [name for name in watched if not name.startswith("val/") and not fnmatch.filter(logged, name)]


@pytest.mark.parametrize(
    ("registry", "name"),
    [(registry, name) for registry in (ADVANTAGES, POLICY_LOSSES) for name in registry.names],
)
def test_every_algorithm_learns_and_logs_what_it_says_to_watch(grid, registry, name):
    pair = ("grpo", name)
    if registry is ADVANTAGES:
        losses = ("vanilla", *POLICY_LOSSES.names)
        pair = (name, next(loss for loss in losses if not grid.refused(name, loss)))
    metrics, moved = grid.outcome(*pair)
    assert all(math.isfinite(value) for value in metrics.values() if isinstance(value, float))
    assert metrics["actor/grad_norm"] > 0
    assert all(0 < distance < 0.1 for distance in moved.values()), moved
    assert unseen(registry, name, metrics) == []
