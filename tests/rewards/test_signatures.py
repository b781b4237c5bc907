from collections.abc import Callable
from typing import Any

import pytest

from tandem.data.forms import PromptForm
from tandem.errors import RewardError
from tandem.rewards import Item, score
from tandem.rewards.base import WeightedSum
from tandem.rewards.signatures import Reads
from tests.support.refusing import refused

Load = Callable[..., Any]


@pytest.fixture
def load(own):
    return lambda code, **kwargs: own(code, "f", **kwargs)


def item(response, uid="p", prompt="1+1=", **columns):
    return Item("data", response, None, {}, 0, {"prompt": prompt, **columns}, uid, (5, 6))


def scores(reward, *items):
    return [each.score for each in score(items, reward)]


@pytest.mark.parametrize(("parameters", "needs", "optional"), [
    ("prompt, response, answer", ("prompt", "answer"), ()),
    ("prompt, response, answer, hint=None", ("prompt", "answer"), ("hint",)),
    ("prompt, response, **columns", ("prompt",), None),
    ("prompts, responses, answer", ("prompt", "answer"), ()),
    ("prompt, responses", ("prompt",), ()),
    ("completions, solution, **kwargs", ("prompt", "solution"), None),
    ("prompts, completions, completion_ids, log_extra, log_metric", ("prompt",), ()),
    ("solution_str, **kwargs", ("data_source", "reward_model"), ("extra_info",)),
])  # fmt: skip
def test_the_columns_a_function_reads_are_its_other_parameters(load, parameters, needs, optional):
    reward = load(f"def f({parameters}): return 0.0")
    assert reward.reads == Reads(needs, optional)


@pytest.mark.parametrize(("parameters", "problem"), [
    ("answer", "which responses the function needs"), ("response, responses", "name two ways"),
    ("prompts, response", "name two ways"), ("completions, response", "name two ways"),
    ("completions, trainer_state", "takes trainer_state"),
    ("solution_str, ground_truth", "cannot be called as needed"),
    ("prompt, respnse, answer", r"is 'respnse' the parameter 'response'\?"),
])  # fmt: skip
def test_an_unclear_or_misspelt_signature_is_an_error(load, parameters, problem):
    refused(RewardError, lambda: load(f"def f({parameters}): return 0.0"), problem)


def test_misspelt_arguments_are_refused_before_any_call(load):
    code = "def f(prompt, response, bonus=0.0): return bonus"
    error = refused(RewardError, lambda: load(code, bonsu=1), "did you mean bonus")
    assert str(error.field).endswith("bonsu")
    assert scores(load(code, bonus=1), item("x")) == [1]
    assert load("def f(prompt, response, **more): return 0.0", bonsu=1).kwargs == {"bonsu": 1}


def test_one_response_at_a_time(load):
    reward = load(
        "async def f(prompt, response, answer, bonus, hint=7):\n"
        "    return {'score': (response == answer) + bonus, 'hint': hint, 'len': len(prompt)}",
        bonus=0.5,
    )
    found = score([item("2", answer="2"), item("3", answer="2", hint=1)], reward)
    assert [each.score for each in found] == [1.5, 0.5]
    assert [each.extra for each in found] == [{"hint": 7, "len": 4}, {"hint": 1, "len": 4}]


def test_a_batch_and_a_group(load):
    items = [item("a", "p", k=1), item("b", "q", k=2), item("ccc", "p", k=3)]
    batch = load("def f(responses, k): return [len(r) * x for r, x in zip(responses, k)]")
    assert scores(batch, *items) == [1, 2, 9]
    group = load("def f(prompt, responses, k): return [len(responses) * 10 + x for x in k]")
    assert scores(group, *items) == [21, 12, 23]
    short = load("def f(responses): return [1.0]")
    refused(RewardError, lambda: scores(short, *items), "1 scores for 3 responses")


def test_a_function_of_trls(load):
    code = """
async def f(prompts, completions, completion_ids, answer, log_extra, log_metric, **kwargs):
    assert kwargs.keys() <= {"hint"}, kwargs
    log_extra("first", [c[0]["content"][0] == "x" for c in completions])
    log_extra("heard", [c[0]["content"] for c in completions])
    log_metric("count", len(prompts))
    assert all(c[0]["role"] == "assistant" for c in completions)
    return [None if a is None else float(len(ids)) for ids, a in zip(completion_ids, answer)]
"""
    chat = [{"role": "user", "content": "hi"}]
    items = [item("xy", prompt=chat, answer=1, hint=1), item("y", prompt=chat, answer=None)]
    trl = load(code)
    (found,) = score(items[:1], trl)
    assert (found.score, found.extra) == (2.0, {"first": 1.0, "count": 1.0}) and found.why == "heard: xy"
    refused(RewardError, lambda: score(items, trl), "None")
    both = WeightedSum((("f", trl, 2.0), ("g", load("def f(response, **columns): return 1.0"), 3.0)))
    assert scores(both, *items) == [7.0, 3.0] and both.reads == Reads(("prompt", "answer"), None)
    assert scores(load("def f(completions): return [len(c) for c in completions]"), item("abc")) == [3]


def test_terms_of_one_name_are_an_error(load):
    terms = (("f", load("def f(response): return 1.0"), 1.0),) * 2
    refused(RewardError, lambda: WeightedSum(terms), "own name")


def test_calls_of_an_asynchronous_function_wait_side_by_side(load):
    reward = load(
        "import asyncio\nbarrier = asyncio.Barrier(30)\nasync def f(response):\n"
        "    await asyncio.wait_for(barrier.wait(), 10)\n    return float(response)\n"
    )
    for _ in range(2):  # all in the event loop that the barrier belongs to
        assert scores(reward, *(item(str(number)) for number in range(30))) == list(range(30))


@pytest.mark.parametrize("end", ["sys.exit(3)", "os._exit(3)"])
@pytest.mark.parametrize("parameter", ["response", "responses"])
def test_an_asynchronous_function_cannot_end_the_process(load, end, parameter):
    code = f"import asyncio, os, sys\nasync def f({parameter}):\n    await asyncio.sleep(0)\n    {end}"
    refused(RewardError, lambda: scores(load(code), item("a"), item("b")), "exit status 3")
    assert scores(load("async def f(response): return 1"), item("a")) == [1]


ROW = {"prompt": "1+1=", "completion": "3", "completions": ["3"], "completion_ids": [7], "answer": "2"}


@pytest.mark.parametrize("name", ["completion", "completions", "completion_ids"])
def test_a_completion_column_of_trls_is_no_problem(name):
    form = PromptForm(needs=("answer",))
    assert form.problem({"prompt": "1+1=", "answer": "2", name: ROW[name]}) is None
    assert "column name response" in str(form.problem({"prompt": "1+1=", "answer": "2", "response": "3"}))


@pytest.mark.parametrize(("parameters", "given"), [
    ("completions", {"completions": ["2"], "prompts": ["1+1="], "completion_ids": [(5, 6)], "answer": ["2"]}),
    ("prompts, responses", {"prompts": ["1+1="], "responses": ["2"], "answer": ["2"]}),
    ("prompt, response", {"prompt": "1+1=", "response": "2", "answer": "2"}),
])  # fmt: skip
def test_functions_are_given_what_the_policy_wrote(load, parameters, given):
    reward = load(f"def f({parameters}, **columns): ...")
    found = reward.arguments([Item("data", "2", None, {}, 0, ROW, "0-0", (5, 6))])
    assert found == given
