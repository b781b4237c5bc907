"""The rewards of verl's data sources on right, wrong, odd and hostile responses; sources without reward."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.errors import RewardError
from tandem.rewards import Item, dapo, geometry3k, load_custom, math, reward_for, score, search_qa
from tandem.rewards.truths import truths

SCORED = {
    "gsm8k": ["openai/gsm8k"],
    "math": ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"]
    + [f"numina_{part}" for part in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc")]
    + ["numina_cn_k12", "numina_olympiads"],
    "dapo": ["math_dapo", "math", "math_dapo_reasoning", "aime", "aime2024", "aime25_x"],
    "geometry3k": ["hiyouga/geometry3k"],
    "search_qa": [
        f"searchR1_{part}"
        for part in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    ],
}
PROGRAMS = ["codecontests", "apps", "codeforces", "taco"]
HOSTILE = [
    "", " ", "\x00\ud800", "a" * 1_000_000, "9" * 1_000_000, "\\boxed{" * 150_000,
    "\\boxed{" + "{" * 1_000_000, "<answer>" * 120_000, "</answer>" * 110_000, "<think>" * 140_000,
    "Answer:" * 140_000, "####" * 250_000, "#### " + "$" * 1_000_000, "\n" * 1_000_000,
]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "source"), [(m, source) for m, names in SCORED.items() for source in names]
)
def test_every_source_has_its_scorer(module: str, source: str) -> None:
    assert reward_for(source).name == f"tandem.rewards.{module}.compute_score"


def test_ones_own_function_scores_programs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def compute_score(**given):\n    return 0.5\n")
    custom = load_custom(str(tmp_path / "mine.py"))
    assert [scored.score for scored in score([Item(source, "x", "{}") for source in PROGRAMS], custom)] == [
        0.5
    ] * 4


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: f"{text[:9]!a} {len(text)}")
def test_hostile_responses_are_wrong_and_quick(text: str) -> None:
    items = [
        Item(names[0], text, {"target": ["72"]} if module == "search_qa" else "72")
        for module, names in SCORED.items()
    ]
    start = time.perf_counter()
    scored = score(items)
    assert time.perf_counter() - start < 10
    assert [one.score for one in scored] == [0, 0, -1, 0, 0]


@pytest.mark.parametrize("truth", [None, "", " ", [], [None], [""], ["5", None], {}, {"a": 1}, object()])
@pytest.mark.parametrize("source", ["gsm8k", "MATH", "math_dapo", "hiyouga/geometry3k", "searchR1_nq"])
def test_a_ground_truth_that_names_no_answer_is_the_users_error(source: str, truth: Any) -> None:
    with pytest.raises(
        RewardError, match=f"row 3 of the data, data_source '{source}'.*raised ValueError: the ground"
    ):
        score([Item(source, "#### 5, \\boxed{None}", truth, index=3)])


@pytest.mark.parametrize(("given", "expected"), [
    ("5", ["5"]), (5, ["5"]), (0, ["0"]), (["5", 6], ["5", "6"]), (np.array(["a", "b"]), ["a", "b"]),
    (("x ",), ["x"]),
])  # fmt: skip
def test_truths(given: Any, expected: list[str]) -> None:
    assert truths(given) == expected


@pytest.mark.parametrize("source", ["gsm8k", "MATH", "math_dapo", "hiyouga/geometry3k"])
def test_of_several_ground_truths_any_will_do(source: str) -> None:
    response = "<think></think> #### 7\n\\boxed{7}"
    assert [score([Item(source, response, truth)])[0].right for truth in (["6", "7"], [7], ["6", "8"])] == [
        True, True, False,
    ]  # fmt: skip


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
def test_dapo(response: str, pred: str | None, right: bool) -> None:
    expected = {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred}
    assert dapo.compute_score("math_dapo", response, "34") == expected
    scored = score([Item("math_dapo", response, "34")])[0]
    assert (scored.score, scored.right, scored.answer, scored.reads_answers) == (
        expected["score"], right, pred, True,
    )  # fmt: skip


@pytest.mark.parametrize(("response", "acc", "form"), [
    (r"<think>so</think> \boxed{35}", 1, 1), (r"<think>so</think> \boxed{\frac{70}{2}} is it.", 1, 1),
    (r"<think>so</think> \boxed{34}", 0, 1), (r"<think>so \boxed{35}", 1, 0),
    (r"<think>\boxed{35}</think>", 1, 0), (r"</think><think>\boxed{35}", 1, 0),
    ("\n<think>so</think> \\boxed{35}", 1, 0), ("<think>so</think> 35", 0, 0),
    (r"<think>so</think> \boxed{", 0, 0), ("", 0, 0),
])  # fmt: skip
def test_geometry3k(response: str, acc: float, form: float) -> None:
    scored = score([Item("hiyouga/geometry3k", response, "35")])[0]
    assert scored.score == pytest.approx(0.9 * acc + 0.1 * form)
    assert scored.extra == {"acc": acc, "format": form}
    assert scored.right == bool(acc)
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
def test_search(wrap: Any, response: str, pred: str | None, expected: float) -> None:
    scored = score([Item("searchR1_nq", response, wrap(["Paris", "the city of Paris"]))])[0]
    assert (scored.score, scored.answer) == (expected, pred)
    assert scored.extra == {"acc": float(expected > 0)}


def test_search_keeps_answers_of_nothing_but_articles_or_punctuation() -> None:
    for pred, truth, expected in (
        ("the", "A", 0),
        ("a", "A", 1),
        ("!!!", "!!!", 1),
        ("", "The", 0),
        ("?", "!", 0),
    ):
        found = search_qa.compute_score("searchR1_nq", f"<answer>{pred}</answer>", {"target": truth})
        assert found["score"] == expected, (pred, truth)


@pytest.mark.parametrize("method", ["flexibel", "", None, 1])
def test_an_unknown_method_of_gsm8k_is_refused_before_any_response(method: Any) -> None:
    with pytest.raises(RewardError) as caught:
        load_custom("tandem.rewards.gsm8k", kwargs={"method": method})
    text = str(caught.value)
    assert text.startswith("custom_reward_function.reward_kwargs.method: ") and "choices\n" in text
    assert "one of strict, flexible" in text


@pytest.mark.parametrize(("answer", "truth", "expected"), [
    (r"\frac{2}{4}", r"\frac{1}{2}", 1), (r"5 \text{ million}", "5000000", 1), (r"5 \text{ million}", "5", 0),
    ("60 miles per hour", r"60 \text{ mph}", 1), (r"5 \text{ m/s}", r"5 \text{ km/h}", 0),
    (r"5\text{ cm}^2", r"5\text{ cm}", 0), (r"18\pi \text{ cm}^2", r"18\pi", 1),
    ("11 pm", r"11 \text{ am}", 0), (r"\text{no solution}", "no solution", 1), ("90°", "90", 1),
    (r"1\frac12", r"\frac32", 1), ("1 1/2", r"\frac32", 1), (r"\frac 1 2", "0.5", 1), ("(1,2)", "[1,2]", 0),
    ("x = 4 = 5", "5", 0), ("x^2", "X^2", 0), (r"x\ge 2", r"x \geq 2", 1), ("", "5", 0), ("?", "5", 0),
    ("=" * 500, "5", 0), ("((((", "5", 0),
])  # fmt: skip
def test_values_and_what_stands_beside_them(answer: str, truth: str, expected: float) -> None:
    assert math.compute_score("MATH", f"\\boxed{{{answer}}}", truth) == expected
