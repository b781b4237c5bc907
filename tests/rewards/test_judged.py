"""Answers that were marked by hand with strict rules: no reward accepts a wrong answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.rewards import Item, arithmetic, gsm8k, rules, score
from tandem.texts import parse_json

ROWS = [
    parse_json(line)
    for line in Path(__file__).with_name("judged.jsonl").read_text(encoding="utf-8").splitlines()
]
SCORERS: dict[str, Callable[[str, Any], float]] = {
    "arithmetic": lambda response, truth: arithmetic.compute_score("arithmetic", response, truth),
    "gsm8k": lambda response, truth: gsm8k.compute_score("gsm8k", response, truth),
    "numeric": lambda response, truth: float(rules.numeric(response, truth)["score"]),
    "choice": lambda response, truth: float(rules.choice(response, truth)["score"]),
    "countdown": lambda response, truth: float(rules.countdown(response, **truth)["score"]),
    "json_schema": lambda response, schema: float(rules.json_schema(response, schema)["score"]),
    "exact": lambda response, truth: float(rules.exact(response, truth)["score"]),
    "math": lambda response, truth: score([Item("lighteval/MATH", response, truth)])[0].score,
    "math_dapo": lambda response, truth: score([Item("math_dapo", response, truth)])[0].extra["acc"],
}

MISSED: dict[str, list[str]] = {"json_schema": ['```json\n{"a":"```"}\n```']}
"""Right answers in forms that a reward does not recognize."""


@pytest.mark.parametrize("scorer", sorted({row["scorer"] for row in ROWS}))
def test_the_scorer_agrees_with_the_judge(scorer: str) -> None:
    rows = [row for row in ROWS if row["scorer"] == scorer]
    told = [(row, SCORERS[scorer](row["response"], row["truth"])) for row in rows]
    wrong = [row for row, given in told if given > row["score"]]
    missed = [row for row, given in told if given < row["score"]]
    print(f"{scorer}: {len(wrong)} false positives and {len(missed)} misses in {len(rows)} answers")
    assert wrong == [], "a wrong answer passes"
    assert [row["response"] for row in missed] == MISSED.get(scorer, [])


def test_no_pair_is_judged_twice() -> None:
    pairs = [(row["scorer"], row["response"], json.dumps(row["truth"])) for row in ROWS]
    assert len(set(pairs)) == len(pairs)
