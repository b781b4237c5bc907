import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

from tandem.config.rewards import RewardConfig
from tandem.errors import RewardError
from tandem.rewards import (
    Item,
    Pool,
    Reward,
    Scored,
    base,
    known_data_sources,
    load_custom,
    register_reward,
    reward_for,
    score,
)
from tandem.rewards.base import WeightedSum
from tandem.rewards.combination import Combination, Running
from tests.support.refusing import refused

ITEMS = [Item("a", "first", "1", {"level": 3}, index=7), Item("b", "second " * 100, "2")]


def returning(value):
    return Reward("mine", lambda **_: value)


def batched(function):
    function.batched = True
    return Reward("mine", function)


def raised(reward):
    return refused(RewardError, lambda: score(ITEMS, reward))


@pytest.mark.parametrize("source", ["math_dap", "mathematics", "code", "", "Arithmetic"])
def test_unknown_data_source(source):
    error = refused(RewardError, lambda: reward_for(source))
    assert error.field == f"data_source '{source}'" and ", ".join(known_data_sources()) in str(error.expected)
    assert "custom_reward_function.path" in str(error.remedy)


def test_registering_exact_names_and_beginnings(monkeypatch):
    monkeypatch.setattr(base, "_REWARDS", {})

    @register_reward("task*", "exact")
    def short(**_):
        return 1.0

    @register_reward("task/long*", "task")
    def long(**_):
        return 2.0

    assert known_data_sources() == ("exact", "task", "task*", "task/long*")
    sources = ["task", "task/x", "task/long", "task/longer", "exact"]
    assert [entry.score for entry in score([Item(s, "", "") for s in sources])] == [2, 1, 2, 2, 1]
    refused(RewardError, lambda: reward_for("exactly"), "exact")
    refused(RewardError, lambda: register_reward("task")(short), "already has a reward")


def test_function_gets_everything_by_name():
    calls = []
    reward = Reward("mine", lambda **given: calls.append(given) or 0.0, {"weight": 2})
    score(ITEMS[:1], reward)
    given = {"data_source": "a", "solution_str": "first", "ground_truth": "1", "extra_info": {"level": 3}}
    assert calls == [given | {"weight": 2}]


@pytest.mark.parametrize(("value", "expected"), [
    (0.25, 0.25), (-3, -3.0), (True, 1.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (np.bool_(True), 1.0),
    (np.array(0.5), 0.5), (torch.tensor(0.5, requires_grad=True), 0.5), (Fraction(1, 4), 0.25),
])  # fmt: skip
def test_numbers_of_all_kinds(value, expected):
    for reward in (returning(value), returning({"score": value})):
        result = score(ITEMS, reward)
        assert result == [Scored(expected), Scored(expected)] and type(result[0].score) is float


def test_numbers_beside_the_score_are_kept():
    value = {"score": 1, "acc": True, "format": np.float64(0.5), "pred": "42", "why": None, "all": [1]}
    why = "answer 42, expected 1"
    expected = Scored(1.0, {"acc": 1.0, "format": 0.5}, "42", reads_answers=True, why=why)
    assert score(ITEMS[:1], returning(value)) == [expected] and value["score"] == 1


def test_the_answer_of_a_sum_is_that_of_the_first_function_that_reads_one():
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
def test_what_is_no_score(value, problem):
    error = raised(returning(value))
    assert error.field == "sample 0, row 7 of the data, data_source 'a'"
    assert "mine" in error.message and problem in error.message
    assert str(error.got).startswith(f"{type(value).__name__} ")
    assert str(error.got).endswith(", for the response 'first'")


def test_raising_names_the_sample_and_keeps_the_traceback():
    def function(solution_str, **_):
        return 1 / (solution_str == "first")

    error = raised(Reward("mine", function))
    assert error.field == "sample 1, data_source 'b'"
    assert "mine raised ZeroDivisionError: division by zero (test_base.py, line " in error.message
    assert repr(("second " * 100)[:200]) in str(error) and "second " * 29 not in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError) and error.__cause__.__traceback__ is not None
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_batched_function():
    calls = []

    def function(**given):
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
def test_batched_that_returns_no_list_of_the_right_length(values, got):
    error = raised(batched(lambda **_: values))
    assert got in str(error.got) and "list" in error.message


def test_batched_with_one_bad_entry_names_it():
    assert raised(batched(lambda **_: [1.0, math.nan])).field == "sample 1, data_source 'b'"
    assert "first sample" in str(raised(batched(lambda **_: {}["x"])))


def test_mixed_sources_keep_their_order_and_places():
    sources = ["gsm8k", "arithmetic", "gsm8k", "arithmetic"]
    items = [Item(source, "#### 2", str(place)) for place, source in enumerate(sources)]
    assert [entry.score for entry in score(items)] == [0, 0, 1, 0]
    items[2] = Item("gsm8k", "#### 2", "two")
    error = refused(RewardError, lambda: score(items), "raised ValueError")
    assert error.field == "sample 2, data_source 'gsm8k'" and "'two'" in error.message
    assert score([]) == []


def why(reward, item=None):
    return score([item or Item("x", "text", None, columns={"prompt": "p"})], reward)[0].why


@pytest.mark.parametrize(("source", "response", "truth", "said"), [
    ("openai/gsm8k", "#### 1,072", "1072", "answer 1072, expected 1072"),
    ("lighteval/MATH", r"\boxed{\frac12}", "0.5", r"answer \frac12, expected 0.5"),
    ("arithmetic", "3+4=8", "7", "answer 8, expected 7"), ("gsm8k", "it is 72", "72", "no answer found"),
    ("math_dapo", "Answer: 3", "4", "answer 3, expected 4"),
    ("hiyouga/geometry3k", "35", "35", "no answer found"),
    ("searchR1_nq", "<answer>a</answer>", {"target": ["b"]}, "answer a, expected {'target': ['b']}"),
])  # fmt: skip
def test_what_the_scorers_say(source, response, truth, said):
    item = Item(source, response, truth)
    assert why(None, item) == said
    if source == "gsm8k":  # a user may name it, with arguments of its own
        assert why(load_custom("tandem.rewards.gsm8k"), item) == said
        flexible = load_custom("tandem.rewards.gsm8k", kwargs={"method": "flexible"})
        assert why(flexible, item) == "answer 72, expected 72" and flexible.bounded


@pytest.mark.parametrize(("said", "kept"), [
    ("short", "short"), ("x" * 600, "x" * 500), ("half \ud800 of a pair", "half ? of a pair"), (None, ""),
    (3, ""),
])  # fmt: skip
def test_what_a_function_says(said, kept):
    assert why(Reward("mine", lambda **_: {"score": 1, "why": said})) == kept


def test_sums_name_who_says_what():
    said = {"right": "yes", "mute": "", "long": "z" * 600}
    terms = [(name, returning({"score": 1, "why": text}), 1.0) for name, text in said.items()]
    assert why(WeightedSum(tuple(terms))) == ("right: yes; long: " + "z" * 500)[:500]


def test_a_failure_is_a_reason():
    def fails(**_):
        raise ValueError("no idea")

    pool = Pool(Reward("mine", fails), RewardConfig(num_workers=0, on_error="zero"))
    (scored,) = pool.score([Item("x", "text", None)])
    assert scored.failed and scored.why.startswith("failed: ")
    assert "ValueError: no idea (test_base.py, line " in scored.why


def test_running_statistics_are_those_of_all_scores_at_once():
    draw, running, seen = np.random.default_rng(0), Running(), []
    assert running.normalised(3.0) == 3.0 and running.after([2.0, 2.0]).normalised(3.0) == 1.0
    for size in (1, 5, 0, 40, 2):
        batch = draw.normal(1e6, 3.0, size=size).tolist()
        running, seen = running.after(batch), seen + batch
        assert running.scores == len(seen) and running.mean == pytest.approx(np.mean(seen), rel=1e-14)
        assert running.squares == pytest.approx(np.var(seen) * len(seen), rel=1e-9)
    assert running.normalised(seen[3]) == pytest.approx((seen[3] - np.mean(seen)) / np.std(seen), rel=1e-9)


@pytest.mark.parametrize(("body", "expected"), [
    ("min(scores.values())", -2.0), ('scores["help"] if scores["safe"] > 0 else -1', -1.0), ('"1"', "'1'"),
    ('scores["nothing"]', "KeyError"), ("float('inf')", "inf"),
])  # fmt: skip
def test_a_function_of_the_scores(tmp_path, body, expected):
    (tmp_path / "mine.py").write_text(f"def one(scores): return {body}\n")
    combination = Combination((), f"{tmp_path / 'mine.py'}:one")
    if isinstance(expected, float):
        assert combination.made({"help": 5.0, "safe": -2.0}, "sample 0") == expected
        return
    error = refused(RewardError, lambda: combination.made({"help": 5.0, "safe": -2.0}, "sample 0"))
    assert expected in str(error) and "help 5, safe -2" in str(error.got)
    assert "sample 0" in str(error.field)
