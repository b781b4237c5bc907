"""Running statistics compared with those of all scores at once, and user functions that combine scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tandem.errors import RewardError
from tandem.rewards.combination import Combination, Running


def test_running_statistics_are_those_of_all_scores_at_once() -> None:
    draw = np.random.default_rng(0)
    batches = [draw.normal(1e6, 3.0, size=size).tolist() for size in (1, 5, 0, 40, 2)]
    running, seen = Running(), []
    for batch in batches:
        running = running.after(batch)
        seen += batch
        assert running.scores == len(seen)
        assert running.mean == pytest.approx(np.mean(seen), rel=1e-14)
        assert running.squares == pytest.approx(np.var(seen) * len(seen), rel=1e-9)
    assert running.normalised(seen[3]) == pytest.approx((seen[3] - np.mean(seen)) / np.std(seen), rel=1e-9)


def test_before_the_first_score_and_without_spread() -> None:
    assert Running().normalised(3.0) == 3.0
    assert Running().after([2.0, 2.0]).normalised(3.0) == 1.0


SOURCE = """
import math
def least(scores): return min(scores.values())
def gated(scores): return scores["help"] if scores["safe"] > 0 else -1
def raises(scores): return scores["nothing"]
def text(scores): return "1"
def endless(scores): return math.inf
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [("least", -2.0), ("gated", -1.0), ("raises", "KeyError"), ("text", "'1'"), ("endless", "inf")],
)
def test_a_function_of_the_scores(tmp_path: Path, name: str, expected: float | str) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    combination = Combination((), f"{tmp_path / 'mine.py'}:{name}")
    if isinstance(expected, float):
        assert combination.made({"help": 5.0, "safe": -2.0}, "sample 0") == expected
        return
    with pytest.raises(RewardError) as caught:
        combination.made({"help": 5.0, "safe": -2.0}, "sample 0")
    assert expected in str(caught.value) and "help 5, safe -2" in str(caught.value.got)
    assert "sample 0" in str(caught.value.field)
