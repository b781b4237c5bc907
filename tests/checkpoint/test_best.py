"""The best checkpoint is kept in addition to the newest."""

import json
import math
from itertools import pairwise

import pytest

from tandem.checkpoint import CheckpointManager
from tandem.checkpoint.best import Best

VALUES = {1: 0.2, 2: 0.5, 3: 0.1, 4: 0.5, 5: 0.4, 6: 0.3}


def saved(root, best, values, keep=2):
    manager = CheckpointManager(root, keep, best=best)
    for step, value in values.items():
        manager.save(step, {}, {"n": step}, {} if value is None else {"val/accuracy": value, "loss": 1.0})
    return manager


def names(root):
    return sorted(int(path.name[5:]) for path in root.iterdir())


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 3)])
def test_the_first_of_the_best_is_kept_beside_the_last_two(tmp_path, mode, best):
    judge = Best("val/accuracy", mode)
    manager = saved(tmp_path, judge, VALUES)
    assert names(tmp_path) == [best, 5, 6]
    found = manager.best(judge)
    assert (found.step, found.state) == (best, {"n": best})
    assert manager.latest().step == 6
    manifest = json.loads((tmp_path / f"step_{best:06d}" / "manifest.json").read_text())
    assert manifest["metric"] == {"name": "val/accuracy", "value": VALUES[best]}


def test_a_better_one_takes_its_place(tmp_path):
    manager = saved(tmp_path, Best("val/accuracy"), VALUES | {7: 0.6, 8: 0.1, 9: 0.1})
    assert names(tmp_path) == [7, 8, 9]
    assert manager.best(Best("val/accuracy")).step == 7


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_a_step_without_the_metric_is_never_the_best(tmp_path, missing):
    judge = Best("val/accuracy")
    manager = saved(tmp_path, judge, {1: missing, 2: -3.0, 3: missing, 4: missing, 5: missing})
    assert names(tmp_path) == [2, 4, 5]
    assert manager.best(judge).step == 2
    assert manager.best(Best("loss")) is None


def test_without_a_judge_nothing_changes(tmp_path):
    manager = saved(tmp_path, None, VALUES)
    assert names(tmp_path) == [5, 6]
    assert manager.best(Best("val/accuracy")) is None


def test_damage_is_told_and_passed_over_in_the_choice(tmp_path):
    said = []
    saved(tmp_path, Best("val/accuracy"), {1: 0.9, 2: 0.5, 3: 0.1}, keep=None)
    (tmp_path / "step_000001" / "manifest.json").write_text("{")
    manager = CheckpointManager(tmp_path, best=Best("val/accuracy"), log=said.append)
    assert manager.best(Best("val/accuracy")).step == 2
    assert "step_000001" in said[0]


def test_random_values_against_a_plain_search(tmp_path):
    """After each save, the last two checkpoints and the best one among all saved so far are kept."""
    values = {step: ((step * 37) % 11) / 10 for step in range(1, 25)}
    judge = Best("val/accuracy", "min")
    manager = CheckpointManager(tmp_path, 2, best=judge)
    for step, value in values.items():
        manager.save(step, {}, {}, {"val/accuracy": value})
        best = min(range(1, step + 1), key=lambda s: (values[s], s))
        assert names(tmp_path) == sorted({best, max(1, step - 1), step})
    assert all(a < b for a, b in pairwise(names(tmp_path)))
