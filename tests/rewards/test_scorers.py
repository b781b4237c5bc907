"""The rewards of data sources: which answer each reads, and what it accepts as right."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tandem.errors import RewardError
from tandem.rewards import Item, arithmetic, gsm8k, math, score
from tandem.rewards.boxes import last_boxed
from tandem.rewards.comparer import Comparer
from tandem.rewards.numbers import to_number


@pytest.mark.parametrize("truth", ["x", "", "1 2", "1/2", None, "nan"])
def test_a_ground_truth_that_is_no_number(truth: Any) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        to_number(truth)


@pytest.mark.parametrize(("response", "truth", "expected"), [
    ("7", "7", 1), ("7", 7, 1), (" 07.0 ", "7", 1), ("1,234", 1234, 1), ("-5", "-5", 1), ("-5", "5", 0),
    ("3+4=7", "7", 1), ("3 + 4 = 7, and 1 more is 8", "7", 1), ("=3 no, =4", "4", 1), ("#### 5 = 6", "5", 0),
    ("6 #### ", "6", 0), ("6 =", "6", 0), ("it is 6 or 7", "7", 0), ("it is 6 or 7", "6", 0), ("77", "7", 0),
    ("7.5", "7", 0), ("10000000000000000000001", "10000000000000000000000", 0), ("9" * 50_000, "9", 0),
    ("", "7", 0),
])  # fmt: skip
def test_arithmetic(response: str, truth: Any, expected: float) -> None:
    assert arithmetic.compute_score("arithmetic", response, truth) == expected


@pytest.mark.parametrize(("response", "strict", "flexible"), [
    ("so 3*24=72\n#### 72", 1, 1), ("#### $72", 1, 1), ("####72.00", 1, 1), ("#### 71\n#### 72", 1, 1),
    ("#### 72\n#### 71", 0, 0), ("#### 72 and 9 more", 1, 0), ("the answer is 72", 0, 1),
    ("the answer is 72.", 0, 1), ("#### x 72", 0, 1), ("#### -72", 0, 0), ("no idea", 0, 0),
])  # fmt: skip
def test_gsm8k(response: str, strict: float, flexible: float) -> None:
    for truth in ("72", 72, "he has 3*24=<<3*24=72>>72\n#### 72"):
        assert gsm8k.compute_score("openai/gsm8k", response, truth) == strict
        assert gsm8k.compute_score("openai/gsm8k", response, truth, method="flexible") == flexible


def test_gsm8k_takes_linear_time() -> None:
    start = time.perf_counter()
    assert gsm8k.compute_score("gsm8k", ("####" + " " * 50_000) * 3, "1") == 0
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(("text", "content"), [
    (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"), (r"\boxed{1} then \boxed{2}", "2"),
    (r"\boxed{1} then \boxed{2", "1"), (r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right."),
    (r"\boxed{a \\{b}}", r"a \\{b}"), (r"\boxed{ 3 }", "3"), (r"\boxed{" + "1" * 2000 + "}", None),
    (r"\boxed{1" + " " * 20_000, None), (r"\boxed 42", "42"), (r"$\boxed 42$ is it", "42"),
    (r"\boxed {42}", "42"), (r"\fbox{1} then \fbox{42}", "42"), (r"\boxedness{42}", None), (r"\boxed", None),
    ("1/2", None), ("", None),
])  # fmt: skip
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_last_boxed_of_hostile_text_is_quick() -> None:
    start = time.perf_counter()
    assert last_boxed(r"\boxed{" * 100_000) is None
    assert last_boxed(r"\boxed{" + "{" * 100_000) is None
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(("answer", "truth", "expected"), [
    (r"\frac{1}{2}", r"\frac{1}{2}", 1), ("0.5", r"\frac{1}{2}", 1), (r"\frac12", "1/2", 1),
    ("(x+1)^2", "x^2+2x+1", 1), ("(x+1)^2", "x^2+2x+2", 0),
    (r"\sqrt{12}", r"we find that \boxed{2\sqrt{3}}.", 1), (r"\{2,1\}", r"\{1,2\}", 1), ("[0,1)", "[0,1]", 0),
    ("3", "4", 0), (r"\frac{1}{", r"\frac{1}{2}", 0), ("é\n\U0001f600", "4", 0),
])  # fmt: skip
def test_math(answer: str, truth: str, expected: float) -> None:
    assert math.compute_score("lighteval/MATH", f"It is \\boxed{{{answer}}}.", truth) == expected
    assert math.compute_score("lighteval/MATH", f"It is {answer}.", truth) == 0


def test_math_answers_from_any_thread() -> None:
    results: list[float] = []
    threads = [
        threading.Thread(
            target=lambda: results.append(math.compute_score("math", r"\boxed{0.5}", r"\frac{1}{2}"))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [1.0] * 4


def test_judge_ends_endless_arithmetic_and_goes_on() -> None:
    comparer = Comparer(time_limit_s=1.0)
    assert comparer.equal("1/2", "0.5")
    start = time.perf_counter()
    assert not comparer.equal("1", "9^{9^{9^{9}}} - 9^{9^{9^{9}}}")
    assert time.perf_counter() - start < 10
    assert comparer.equal("1/2", "0.5")
    comparer.close()
    comparer.close()


def test_judge_that_cannot_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "broken").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "broken").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "broken"))
    with pytest.raises(RewardError, match="did not start") as caught:
        Comparer().equal("1", "2")
    assert "pip install 'math-verify" in str(caught.value)


def test_bad_ground_truth_is_the_users_error_with_the_row() -> None:
    items = [Item("arithmetic", "7", "7"), Item("gsm8k", "8", "eight", index=41)]
    with pytest.raises(RewardError) as caught:
        score(items)
    text = str(caught.value)
    assert text.startswith(
        "sample 1, row 41 of the data, data_source 'gsm8k': the reward function "
        "tandem.rewards.gsm8k.compute_score raised ValueError: the ground truth 'eight' is not a number\n"
    )
