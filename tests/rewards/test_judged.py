from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs.odd_formats import FORMS, ODD, PAGE, page
from tandem.rewards import Item, arithmetic, gsm8k, rules, score
from tandem.texts import parse_json


def rows_in(name):
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return [parse_json(line) for line in lines]


ODD_ROWS, ROWS = rows_in("answers.jsonl"), rows_in("judged.jsonl")
DOCUMENTED = Path(__file__).parents[2] / "docs" / "verl-rewards.md"
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
def test_the_scorer_agrees_with_the_judge(scorer):
    rows = [row for row in ROWS if row["scorer"] == scorer]
    told = [(row, SCORERS[scorer](row["response"], row["truth"])) for row in rows]
    assert [row for row, given in told if given > row["score"]] == [], "a wrong answer passes"
    missed = [row["response"] for row, given in told if given < row["score"]]
    assert missed == MISSED.get(scorer, [])


@pytest.mark.parametrize("source", ["openai/gsm8k", "lighteval/MATH"])
def test_the_scorers_agree_with_people_on_odd_formats(source):
    rows = [row for row in ODD_ROWS if row["source"] == source]
    found = score([Item(source, row["response"], row["truth"]) for row in rows])
    pairs = list(zip(rows, found, strict=True))
    assert [row for row, scored in pairs if scored.right and not row["right"]] == []
    missed = [row for row, scored in pairs if row["right"] and not scored.right]
    assert len(missed) <= 0.01 * len(rows), missed
    text = DOCUMENTED.read_text(encoding="utf-8")
    for row in missed:
        assert f"- `{row['response'].splitlines()[-1]}` for `{row['truth']}`" in text, "make it known there"


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"{odd.written} for {odd.truth}")
def test_the_column_of_tandem(odd):
    found = ""
    for source, expected in zip(FORMS, odd.tandem, strict=True):
        item = Item(source, odd.response(source), odd.truth)
        if expected == "-":
            found += "-"
        elif source == "gsm8k, flexible":
            found += str(int(gsm8k.compute_score(source, item.solution_str, odd.truth, method="flexible")))
        else:
            found += str(int(score([item])[0].right))
    assert found == odd.tandem


def test_the_page_of_odd_formats_is_that_of_the_table():
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "python -m docs.odd_formats"
