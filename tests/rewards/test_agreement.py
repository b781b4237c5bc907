"""Answers in odd formats, decided by hand: the GSM8K and MATH rewards agree and accept no wrong answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.rewards import Item, score

ROWS = [
    json.loads(line)
    for line in Path(__file__).with_name("answers.jsonl").read_text(encoding="utf-8").splitlines()
]
PAGE = Path(__file__).parents[2] / "docs" / "verl-rewards.md"


@pytest.mark.parametrize(("source", "least"), [("openai/gsm8k", 100), ("lighteval/MATH", 200)])
def test_the_scorers_agree_with_people(source: str, least: int) -> None:
    rows = [row for row in ROWS if row["source"] == source]
    assert len(rows) >= least and len({(row["response"], row["truth"]) for row in rows}) == len(rows)
    found = score([Item(source, row["response"], row["truth"]) for row in rows])
    pairs = list(zip(rows, found, strict=True))
    assert [row for row, scored in pairs if scored.right and not row["right"]] == []
    missed = [row for row, scored in pairs if row["right"] and not scored.right]
    assert len(missed) <= 0.01 * len(rows), missed
    page = PAGE.read_text(encoding="utf-8")
    for row in missed:
        assert f"- `{row['response'].splitlines()[-1]}` for `{row['truth']}`" in page, "make it known there"
