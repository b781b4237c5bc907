"""The table of odd formats: the rewards give the scores in its column, and the docs page is made from it."""

from __future__ import annotations

import pytest

from docs.odd_formats import FORMS, ODD, PAGE, Odd, page
from tandem.rewards import Item, gsm8k, score


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"{odd.written} for {odd.truth}")
def test_the_column_of_tandem(odd: Odd) -> None:
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


def test_the_page_is_that_of_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "python -m docs.odd_formats"
