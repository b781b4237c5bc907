"""The registry of rewards, and the checks of what reward functions return."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tandem.errors import RewardError
from tandem.rewards import Item, Reward, Scored, base, known_data_sources, register_reward, reward_for, score
from tandem.rewards.base import WeightedSum

ITEMS = [Item("a", "first", "1", {"level": 3}, index=7), Item("b", "second " * 100, "2")]


def returning(value: Any) -> Reward:
    return Reward("mine", lambda **_: value)


def batched(function: Callable[..., Any]) -> Reward:
    function.batched = True  # type: ignore[attr-defined]
    return Reward("mine", function)


def raised(reward: Reward) -> RewardError:
    with pytest.raises(RewardError) as caught:
        score(ITEMS, reward)
    return caught.value


@pytest.mark.parametrize("source", ["math_dap", "mathematics", "code", "", "Arithmetic"])
def test_unknown_data_source(source: str) -> None:
    with pytest.raises(RewardError) as caught:
        reward_for(source)
    assert caught.value.field == f"data_source '{source}'"
    assert ", ".join(known_data_sources()) in str(caught.value.expected)
    assert "custom_reward_function.path" in str(caught.value.remedy)


def test_registering_exact_names_and_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_REWARDS", {})

    @register_reward("task*", "exact")
    def short(**_: Any) -> float:
        return 1.0

    @register_reward("task/long*", "task")
    def long(**_: Any) -> float:
        return 2.0

    assert known_data_sources() == ("exact", "task", "task*", "task/long*")
    sources = ["task", "task/x", "task/long", "task/longer", "exact"]
    assert [entry.score for entry in score([Item(s, "", "") for s in sources])] == [2, 1, 2, 2, 1]
    with pytest.raises(RewardError, match="exact"):
        reward_for("exactly")
    with pytest.raises(RewardError, match="already has a reward"):
        register_reward("task")(short)


def test_function_gets_everything_by_name() -> None:
    calls: list[dict[str, Any]] = []
    reward = Reward("mine", lambda **given: calls.append(given) or 0.0, {"weight": 2})  # type: ignore[func-returns-value]
    score(ITEMS[:1], reward)
    given = {"data_source": "a", "solution_str": "first", "ground_truth": "1", "extra_info": {"level": 3}}
    assert calls == [given | {"weight": 2}]


@pytest.mark.parametrize(("value", "expected"), [
    (0.25, 0.25), (-3, -3.0), (True, 1.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (np.bool_(True), 1.0),
    (np.array(0.5), 0.5), (torch.tensor(0.5, requires_grad=True), 0.5), (Fraction(1, 4), 0.25),
])  # fmt: skip
def test_numbers_of_all_kinds(value: Any, expected: float) -> None:
    for reward in (returning(value), returning({"score": value})):
        result = score(ITEMS, reward)
        assert result == [Scored(expected), Scored(expected)]
        assert type(result[0].score) is float


def test_numbers_beside_the_score_are_kept() -> None:
    value = {"score": 1, "acc": True, "format": np.float64(0.5), "pred": "42", "why": None, "all": [1]}
    why = "answer 42, expected 1"
    expected = Scored(1.0, {"acc": 1.0, "format": 0.5}, "42", reads_answers=True, why=why)
    assert score(ITEMS[:1], returning(value)) == [expected]
    assert value["score"] == 1


def test_the_answer_of_a_sum_is_that_of_the_first_function_that_reads_one() -> None:
    right = returning({"score": 1, "pred": "42"})
    other = returning({"score": 0, "pred": "43"})
    total = WeightedSum((("short", returning(0.5), 1.0), ("right", right, 2.0), ("other", other, 1.0)))
    (scored,) = score(ITEMS[:1], total)
    assert (scored.score, scored.answer, scored.reads_answers) == (2.5, "42", True)


@pytest.mark.parametrize(("value", "problem"), [
    *((value, "not finite") for value in (math.nan, math.inf, -math.inf, 10**400, {"score": math.nan})),
    ({"score": 1, "acc": math.inf}, "not finite"),
    *((value, "not a number") for value in ("0.5", None, [1.0], (1.0,), 1j, {"score": "1"})),
    (np.ones(1), "not a number"), (torch.ones(2), "not a number"), ({"reward": 1.0}, "without 'score'"),
])  # fmt: skip
def test_what_is_no_score(value: Any, problem: str) -> None:
    error = raised(returning(value))
    assert error.field == "sample 0, row 7 of the data, data_source 'a'"
    assert "mine" in error.message and problem in error.message
    assert str(error.got).startswith(f"{type(value).__name__} ")
    assert str(error.got).endswith(", for the response 'first'")


def test_raising_names_the_sample_and_keeps_the_traceback() -> None:
    def function(solution_str: str, **_: Any) -> float:
        return 1 / (solution_str == "first")

    error = raised(Reward("mine", function))
    assert error.field == "sample 1, data_source 'b'"
    assert "mine raised ZeroDivisionError: division by zero (test_base.py, line " in error.message
    assert repr(("second " * 100)[:200]) in str(error) and "second " * 29 not in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert error.__cause__.__traceback__ is not None
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_batched_function() -> None:
    calls: list[dict[str, Any]] = []

    def function(**given: Any) -> list[Any]:
        calls.append(given)
        return [{"score": 1, "acc": 0}, np.float32(2)]

    assert score(ITEMS, batched(function)) == [Scored(1.0, {"acc": 0.0}), Scored(2.0)]
    given = {"data_sources": ["a", "b"], "solution_strs": ["first", "second " * 100]}
    assert calls == [given | {"ground_truths": ["1", "2"], "extra_infos": [{"level": 3}, {}]}]


@pytest.mark.parametrize(("values", "got"), [
    ([1.0], "1 scores for 2 responses"), ([1.0] * 3, "3 scores for 2 responses"),
    (np.ones(1), "1 scores for 2 responses"), ("ab", "str"), ({"a": 1, "b": 2}, "dict"), (1.0, "float"),
    (None, "None"),
])  # fmt: skip
def test_batched_that_returns_no_list_of_the_right_length(values: Any, got: str) -> None:
    error = raised(batched(lambda **_: values))
    assert got in str(error.got) and "list" in error.message


def test_batched_with_one_bad_entry_names_it() -> None:
    assert raised(batched(lambda **_: [1.0, math.nan])).field == "sample 1, data_source 'b'"
    assert "first sample" in str(raised(batched(lambda **_: {}["x"])))


def test_mixed_sources_keep_their_order_and_places() -> None:
    sources = ["gsm8k", "arithmetic", "gsm8k", "arithmetic"]
    items = [Item(source, "#### 2", str(place)) for place, source in enumerate(sources)]
    assert [entry.score for entry in score(items)] == [0, 0, 1, 0]
    items[2] = Item("gsm8k", "#### 2", "two")
    with pytest.raises(RewardError, match="raised ValueError") as caught:
        score(items)
    assert caught.value.field == "sample 2, data_source 'gsm8k'" and "'two'" in caught.value.message
    assert score([]) == []
