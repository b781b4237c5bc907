import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tandem.errors import RewardError
from tandem.rewards import (
    Item,
    arithmetic,
    dapo,
    geometry3k,
    gsm8k,
    load_custom,
    math,
    reward_for,
    score,
    search_qa,
)  # fmt: skip
from tandem.rewards.boxes import last_boxed
from tandem.rewards.comparer import Comparer
from tandem.rewards.numbers import to_number
from tandem.rewards.truths import truths
from tests.support.refusing import refused

SCORED = {
    "gsm8k": ["openai/gsm8k", "gsm8k", "gsm8k-test"],
    "math": ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500",
             "HuggingFaceH4/aime_2024", "numina_aops_forum", "numina_synthetic_math", "numina_amc_aime",
             "numina_synthetic_amc", "numina_cn_k12", "numina_olympiads"],
    "dapo": ["math_dapo", "math", "math_dapo_reasoning", "aime", "aime2024", "aime25_x"],
    "geometry3k": ["hiyouga/geometry3k"],
    "search_qa": ["searchR1_nq", "searchR1_triviaqa", "searchR1_popqa", "searchR1_hotpotqa",
                  "searchR1_2wikimultihopqa", "searchR1_musique", "searchR1_bamboogle"],
    "arithmetic": ["arithmetic", "arithmetic/hard"],
}  # fmt: skip
HOSTILE = [
    "", " ", "\x00\ud800", "a" * 1_000_000, "9" * 1_000_000, "#### " + "9" * 1_000_000, "\n" * 1_000_000,
    "\\boxed{" * 150_000, "\\boxed{" + "{" * 1_000_000, "<answer>" * 120_000, "</answer>" * 110_000,
    "<think>" * 140_000, "Answer:" * 140_000, "####" * 250_000, ("####" + " " * 50_000) * 3,
    "#### " + "$" * 1_000_000,
]  # fmt: skip


@pytest.mark.parametrize("module", SCORED)
def test_every_source_has_its_scorer(module):
    for source in SCORED[module]:
        assert reward_for(source).name == f"tandem.rewards.{module}.compute_score", source


def test_ones_own_function_scores_programs(own):
    custom = own("def compute_score(**given):\n    return 0.5\n")
    sources = ("codecontests", "apps", "codeforces", "taco")
    assert [one.score for one in score([Item(s, "x", "{}") for s in sources], custom)] == [0.5] * 4


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: f"{text[:9]!a} {len(text)}")
def test_hostile_responses_are_wrong_and_quick(text):
    items = [
        Item(names[0], text, {"target": ["72"]} if module == "search_qa" else "72")
        for module, names in SCORED.items()
    ]
    start = time.perf_counter()
    scored = score(items)
    assert time.perf_counter() - start < 10
    assert [one.score for one in scored] == [0, 0, -1, 0, 0, 0]


@pytest.mark.parametrize("truth", [None, "", " ", [], [None], [""], ["5", None], {}, {"a": 1}, object()])
@pytest.mark.parametrize("source", ["gsm8k", "MATH", "math_dapo", "hiyouga/geometry3k", "searchR1_nq"])
def test_a_ground_truth_that_names_no_answer_is_the_users_error(source, truth):
    item = Item(source, "#### 5, \\boxed{None}", truth, index=3)
    told = f"row 3 of the data, data_source '{source}'.*raised ValueError: the ground"
    refused(RewardError, lambda: score([item]), told)


@pytest.mark.parametrize(("given", "expected"), [
    ("5", ["5"]), (5, ["5"]), (0, ["0"]), (["5", 6], ["5", "6"]), (np.array(["a", "b"]), ["a", "b"]),
    (("x ",), ["x"]),
])  # fmt: skip
def test_truths(given, expected):
    assert truths(given) == expected


@pytest.mark.parametrize("source", ["gsm8k", "MATH", "math_dapo", "hiyouga/geometry3k"])
def test_of_several_ground_truths_any_will_do(source):
    items = [Item(source, "<think></think> #### 7\n\\boxed{7}", t) for t in (["6", "7"], [7], ["6", "8"])]
    assert [scored.right for scored in score(items)] == [True, True, False]


@pytest.mark.parametrize(("response", "pred", "right"), [
    ("Answer: 34", "34", True), ("Answer: 34 \n", "34", True), ("**Answer:** 34", "34", True),
    ("**Answer**: **34**", "34**", True), ("ANSWER :\n34", "34", True), ("Answer: $34$", "$34$", True),
    (r"Answer: $\boxed{34}$", "34", True), (r"\text{Answer:} 34", "34", True),
    ("Answer: x = 34", "x = 34", True), ("Answer: 33\nAnswer: 34", "34", True),
    ("Answer: 34\nAnswer: 33", "33", False), (r"\boxed{33} Answer: 34", "34", True),
    (r"\boxed{34} Answer: 33", "33", False), (r"it is \boxed{34}", "34", True),
    ("Answer: 34" + " " * 400, None, False), ("it is 34", None, False), ("Answer:", None, False),
    ("Answer: 34 or 35", "34 or 35", False), ("Answer: 340", "340", False),
    ("Answer: " + "(" * 250, "(" * 250, False),
])  # fmt: skip
def test_dapo(response, pred, right):
    expected = {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred}
    assert dapo.compute_score("math_dapo", response, "34") == expected
    scored = score([Item("math_dapo", response, "34")])[0]
    assert (scored.score, scored.right, scored.answer) == (expected["score"], right, pred)
    assert scored.reads_answers


@pytest.mark.parametrize(("response", "acc", "form"), [
    (r"<think>so</think> \boxed{35}", 1, 1), (r"<think>so</think> \boxed{\frac{70}{2}} is it.", 1, 1),
    (r"<think>so</think> \boxed{34}", 0, 1), (r"<think>so \boxed{35}", 1, 0),
    (r"<think>\boxed{35}</think>", 1, 0), (r"</think><think>\boxed{35}", 1, 0),
    ("\n<think>so</think> \\boxed{35}", 1, 0), ("<think>so</think> 35", 0, 0),
    (r"<think>so</think> \boxed{", 0, 0), ("", 0, 0),
])  # fmt: skip
def test_geometry3k(response, acc, form):
    scored = score([Item("hiyouga/geometry3k", response, "35")])[0]
    assert scored.score == pytest.approx(0.9 * acc + 0.1 * form)
    assert scored.extra == {"acc": acc, "format": form} and scored.right == bool(acc)
    assert geometry3k.well_formed(response) == bool(form)


@pytest.mark.parametrize(("response", "pred", "expected"), [
    ("<answer>Paris</answer>", "Paris", 1), ("so <answer> the PARIS! </answer> then", "the PARIS!", 1),
    ("<answer>City of  Paris</answer>", "City of  Paris", 1),
    ("<answer>London</answer> no, <answer>Paris</answer>", "Paris", 1),
    ("<answer>Paris</answer> no, <answer>London</answer>", "London", 0),
    ("<answer>Paris</answer> <answer>London", "Paris", 1),
    ("<answer>a<answer>Paris</answer></answer>", "Paris", 1), ("<answer>in Paris</answer>", "in Paris", 0),
    ("<answer>Pari</answer>", "Pari", 0), ("<answer></answer>", "", 0), ("</answer>Paris<answer>", None, 0),
    ("Paris", None, 0),
    ("<answer>x</answer>" * 10 + "<answer>Paris</answer>", "Paris", 0.25),
    ("<answer>x</answer>" * 9 + "<answer>Paris</answer>", "Paris", 1),
])  # fmt: skip
@pytest.mark.parametrize("wrap", [lambda truth: truth, lambda truth: {"target": truth}])
def test_search(wrap, response, pred, expected):
    scored = score([Item("searchR1_nq", response, wrap(["Paris", "the city of Paris"]))])[0]
    assert (scored.score, scored.answer) == (expected, pred) and scored.extra == {"acc": float(expected > 0)}


@pytest.mark.parametrize(
    ("pred", "truth", "expected"),
    [("the", "A", 0), ("a", "A", 1), ("!!!", "!!!", 1), ("", "The", 0), ("?", "!", 0)],
)
def test_search_keeps_answers_of_articles_or_punctuation(pred, truth, expected):
    found = search_qa.compute_score("searchR1_nq", f"<answer>{pred}</answer>", {"target": truth})
    assert found["score"] == expected


@pytest.mark.parametrize("method", ["flexibel", "", None, 1])
def test_an_unknown_method_of_gsm8k_is_refused_before_any_response(method):
    error = refused(RewardError, lambda: load_custom("tandem.rewards.gsm8k", kwargs={"method": method}))
    assert error.field == "custom_reward_function.reward_kwargs.method"
    assert "strict, flexible" in str(error.expected)


@pytest.mark.parametrize("truth", ["x", "", "1 2", "1/2", None, "nan"])
def test_a_ground_truth_that_is_no_number(truth):
    refused(ValueError, lambda: to_number(truth), "is not a number")


@pytest.mark.parametrize(("response", "truth", "expected"), [
    ("7", "7", 1), ("7", 7, 1), (" 07.0 ", "7", 1), ("1,234", 1234, 1), ("-5", "-5", 1), ("-5", "5", 0),
    ("3+4=7", "7", 1), ("3 + 4 = 7, and 1 more is 8", "7", 1), ("=3 no, =4", "4", 1), ("#### 5 = 6", "5", 0),
    ("6 #### ", "6", 0), ("6 =", "6", 0), ("it is 6 or 7", "7", 0), ("it is 6 or 7", "6", 0), ("77", "7", 0),
    ("7.5", "7", 0), ("10000000000000000000001", "10000000000000000000000", 0), ("9" * 50_000, "9", 0),
    ("", "7", 0),
])  # fmt: skip
def test_arithmetic(response, truth, expected):
    assert arithmetic.compute_score("arithmetic", response, truth) == expected


@pytest.mark.parametrize(("response", "strict", "flexible"), [
    ("so 3*24=72\n#### 72", 1, 1), ("#### $72", 1, 1), ("####72.00", 1, 1), ("#### 71\n#### 72", 1, 1),
    ("#### 72\n#### 71", 0, 0), ("#### 72 and 9 more", 1, 0), ("the answer is 72", 0, 1),
    ("the answer is 72.", 0, 1), ("#### x 72", 0, 1), ("#### -72", 0, 0), ("no idea", 0, 0),
])  # fmt: skip
def test_gsm8k(response, strict, flexible):
    for truth in ("72", 72, "he has 3*24=<<3*24=72>>72\n#### 72"):
        assert gsm8k.compute_score("openai/gsm8k", response, truth) == strict
        assert gsm8k.compute_score("openai/gsm8k", response, truth, method="flexible") == flexible


@pytest.mark.parametrize(("text", "content"), [
    (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"), (r"\boxed{1} then \boxed{2}", "2"),
    (r"\boxed{1} then \boxed{2", "1"), (r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right."),
    (r"\boxed{a \\{b}}", r"a \\{b}"), (r"\boxed{ 3 }", "3"), (r"\boxed{" + "1" * 2000 + "}", None),
    (r"\boxed{1" + " " * 20_000, None), (r"\boxed 42", "42"), (r"$\boxed 42$ is it", "42"),
    (r"\boxed {42}", "42"), (r"\fbox{1} then \fbox{42}", "42"), (r"\boxedness{42}", None), (r"\boxed", None),
    ("1/2", None), ("", None),
])  # fmt: skip
def test_last_boxed(text, content):
    assert last_boxed(text) == content


def test_math_answers_from_any_thread():
    with ThreadPoolExecutor(4) as pool:
        each = [pool.submit(math.compute_score, "math", r"\boxed{0.5}", r"\frac{1}{2}") for _ in range(4)]
        assert [one.result() for one in each] == [1.0] * 4


def test_judge_ends_endless_arithmetic_and_goes_on():
    comparer = Comparer(time_limit_s=1.0)
    assert comparer.equal("1/2", "0.5")
    start = time.perf_counter()
    assert not comparer.equal("1", "9^{9^{9^{9}}} - 9^{9^{9^{9}}}")
    assert time.perf_counter() - start < 10
    assert comparer.equal("1/2", "0.5")
    comparer.close()
    comparer.close()


def test_an_answer_that_comes_after_an_interrupt_is_not_that_to_the_next_pair():
    def interrupt(*_):
        raise KeyboardInterrupt

    comparer = Comparer()
    assert comparer.equal("1", "1") and comparer._process is not None
    before = signal.signal(signal.SIGUSR1, interrupt)
    process = comparer._process
    process.send_signal(signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    refused(KeyboardInterrupt, lambda: comparer.equal("1", "1"))
    signal.signal(signal.SIGUSR1, before)
    process.send_signal(signal.SIGCONT)
    assert not comparer.equal("1", "2") and comparer.equal("1", "1")
    comparer._process.kill()
    comparer._process.wait()
    assert not comparer.equal("1", "1") and comparer.equal("1", "1")
    comparer.close()


def test_judge_that_cannot_start(monkeypatch, tmp_path):
    (tmp_path / "broken").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "broken").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "broken"))
    error = refused(RewardError, lambda: Comparer().equal("1", "2"), "did not start")
    assert "pip install 'math-verify" in str(error)


@pytest.mark.parametrize(("answer", "truth", "expected"), [
    (r"\frac{1}{2}", r"\frac{1}{2}", 1), ("0.5", r"\frac{1}{2}", 1), (r"\frac12", "1/2", 1),
    ("(x+1)^2", "x^2+2x+1", 1), ("(x+1)^2", "x^2+2x+2", 0),
    (r"\sqrt{12}", r"we find that \boxed{2\sqrt{3}}.", 1), (r"\{2,1\}", r"\{1,2\}", 1), ("[0,1)", "[0,1]", 0),
    ("3", "4", 0), (r"\frac{1}{", r"\frac{1}{2}", 0), ("é\n\U0001f600", "4", 0),
    (r"\frac{2}{4}", r"\frac{1}{2}", 1), (r"5 \text{ million}", "5000000", 1), (r"5 \text{ million}", "5", 0),
    ("60 miles per hour", r"60 \text{ mph}", 1), (r"5 \text{ m/s}", r"5 \text{ km/h}", 0),
    (r"5\text{ cm}^2", r"5\text{ cm}", 0), (r"18\pi \text{ cm}^2", r"18\pi", 1),
    ("11 pm", r"11 \text{ am}", 0), (r"\text{no solution}", "no solution", 1), ("90°", "90", 1),
    (r"1\frac12", r"\frac32", 1), ("1 1/2", r"\frac32", 1), (r"\frac 1 2", "0.5", 1), ("(1,2)", "[1,2]", 0),
    ("x = 4 = 5", "5", 0), ("x^2", "X^2", 0), (r"x\ge 2", r"x \geq 2", 1), ("", "5", 0), ("?", "5", 0),
    ("=" * 500, "5", 0), ("((((", "5", 0),
])  # fmt: skip
def test_math(answer, truth, expected):
    assert math.compute_score("MATH", f"It is \\boxed{{{answer}}}.", truth) == expected
    assert math.compute_score("MATH", f"It is {answer}.", truth) == 0
