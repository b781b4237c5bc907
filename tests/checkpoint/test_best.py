"""The best checkpoint is kept in addition to the newest."""

import json
import math

import pytest

from tandem.checkpoint import CheckpointManager
from tandem.checkpoint.best import Best

VALUES = {1: 0.2, 2: 0.5, 3: 0.1, 4: 0.5, 5: 0.4, 6: 0.3}
ACCURACY = Best("val/accuracy")


def saved(root, best, values, keep=2):
    manager = CheckpointManager(root, keep, best=best)
    for step, value in values.items():
        manager.save(step, {}, {"n": step}, {} if value is None else {"val/accuracy": value, "loss": 1.0})
    return manager


def steps(root):
    return sorted(int(path.name[5:]) for path in root.iterdir())


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [
        ("max", VALUES, 2),  # the first of the best
        ("min", VALUES, 3),
        ("max", VALUES | {7: 0.6, 8: 0.1, 9: 0.1}, 7),
        *(("max", {1: no, 2: -3.0, 3: no, 4: no, 5: no}, 2) for no in (None, math.nan, math.inf)),
    ],
)
def test_the_best_is_kept_beside_the_last_two(tmp_path, mode, values, best):
    judge = Best("val/accuracy", mode)
    manager = saved(tmp_path, judge, values)
    last = max(values)
    assert steps(tmp_path) == sorted({best, last - 1, last})
    found = manager.best(judge)
    assert (found.step, found.state) == (best, {"n": best})
    assert manager.latest().step == last
    manifest = json.loads((tmp_path / f"step_{best:06d}" / "manifest.json").read_text())
    assert manifest["metric"] == {"name": "val/accuracy", "value": values[best]}
    assert manager.best(Best("loss")) is None


def test_without_a_judge_nothing_changes(tmp_path):
    manager = saved(tmp_path, None, VALUES)
    assert steps(tmp_path) == [5, 6] and manager.best(ACCURACY) is None


def test_damage_is_told_and_passed_over_in_the_choice(tmp_path):
    said = []
    saved(tmp_path, ACCURACY, {1: 0.9, 2: 0.5, 3: 0.1}, keep=None)
    (tmp_path / "step_000001" / "manifest.json").write_text("{")
    manager = CheckpointManager(tmp_path, best=ACCURACY, log=said.append)
    assert manager.best(ACCURACY).step == 2
    assert "step_000001" in said[0]


def test_random_values_against_a_plain_search(tmp_path):
    """After each save, the last two checkpoints and the best one among all saved so far are kept."""
    values = {step: ((step * 37) % 11) / 10 for step in range(1, 25)}
    manager = CheckpointManager(tmp_path, 2, best=Best("val/accuracy", "min"))
    for step, value in values.items():
        manager.save(step, {}, {}, {"val/accuracy": value})
        best = min(range(1, step + 1), key=lambda s: (values[s], s))
        assert steps(tmp_path) == sorted({best, max(1, step - 1), step})
