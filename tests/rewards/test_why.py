"""The explanation of a score: of single rewards, sums and failures, and with long or broken texts."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.config.rewards import RewardConfig
from tandem.rewards import Item, Pool, Reward, load_custom, score
from tandem.rewards.base import WeightedSum

SCORERS = {
    "openai/gsm8k": ("#### 1,072", "1072", "answer 1072, expected 1072"),
    "gsm8k": ("it is 72", "72", "no answer found"),
    "lighteval/MATH": (r"\boxed{\frac12}", "0.5", r"answer \frac12, expected 0.5"),
    "arithmetic": ("3+4=8", "7", "answer 8, expected 7"),
    "math_dapo": ("Answer: 3", "4", "answer 3, expected 4"),
    "hiyouga/geometry3k": ("35", "35", "no answer found"),
    "searchR1_nq": (
        "<answer>Rome</answer>", {"target": ["Paris"]}, "answer Rome, expected {'target': ['Paris']}",
    ),
}  # fmt: skip


def why(reward: Any, item: Item | None = None) -> str:
    return score([item or Item("x", "text", None, columns={"prompt": "p"})], reward)[0].why


@pytest.mark.parametrize("source", SCORERS)
def test_what_the_scorers_say(source: str) -> None:
    response, truth, expected = SCORERS[source]
    assert why(None, Item(source, response, truth)) == expected


def test_a_scorer_that_a_user_names_says_the_same_with_its_own_arguments() -> None:
    item = Item("gsm8k", "it is 72", "72")
    assert why(load_custom("tandem.rewards.gsm8k"), item) == "no answer found"
    flexible = load_custom("tandem.rewards.gsm8k", kwargs={"method": "flexible"})
    assert why(flexible, item) == "answer 72, expected 72"
    assert flexible.bounded


@pytest.mark.parametrize(("said", "kept"), [
    ("short", "short"), ("x" * 600, "x" * 500), ("half \ud800 of a pair", "half ? of a pair"), (None, ""),
    (3, ""),
])  # fmt: skip
def test_what_a_function_says(said: Any, kept: str) -> None:
    assert why(Reward("mine", lambda **_: {"score": 1, "why": said})) == kept


def test_sums_name_who_says_what() -> None:
    def saying(text: str) -> Reward:
        return Reward("mine", lambda **_: {"score": 1, "why": text})

    both = WeightedSum(
        (("right", saying("yes"), 1.0), ("mute", saying(""), 1.0), ("long", saying("z" * 600), 0.5))
    )
    assert why(both) == ("right: yes; long: " + "z" * 500)[:500]


def test_a_failure_is_a_reason() -> None:
    def fails(**_: Any) -> float:
        raise ValueError("no idea")

    pool = Pool(Reward("mine", fails), RewardConfig(num_workers=0, on_error="zero"))
    (scored,) = pool.score([Item("x", "text", None)])
    assert (
        scored.failed
        and scored.why.startswith("failed: ")
        and "ValueError: no idea (test_why.py, line " in scored.why
    )
