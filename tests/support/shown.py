"""Figures of the files in benchmarks/results that docs pages show, for `tests/docs/test_figures.py`."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MEASURED = "docs/measurements.md"

Shown = Iterator[tuple[str, str] | str]
"""Pages, and phrases that appear on them once; without a page, phrases of MEASURED. `…`: rest of a cell."""


def plain(text: str) -> str:
    return " ".join(re.sub(r"<!--.*?-->", "", text, flags=re.S).split())


@cache
def page(name: str) -> str:
    return plain((ROOT / name).read_text("utf-8"))


def times_in(text: str, phrase: str) -> int:
    """Count how often a phrase appears in a text, but not as part of a longer number or word."""
    pattern = re.escape(plain(phrase)).replace("…", "[^|]*")
    return len(re.findall(rf"(?<![\w.,-]){pattern}(?![\w%]|[.,]\d)", text))


def one(rows: Iterable[Any], **wanted: Any) -> Any:
    (found,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return found


def span(values: Iterable[float], form: str) -> str:
    known = sorted(values)
    return f"{known[0]:{form}} to {known[-1]:{form}}"


def word(number: int) -> str:
    return ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")[number]
