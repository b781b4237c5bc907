"""Decimal numbers in text, exactly and whatever their length."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

# A minus right after a digit, letter or bracket is an operator, not a sign; ‘.5’ stands after no digit.
NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-+])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![\w.]))?"
)


def numbers_in(text: str) -> Iterator[Decimal]:
    """All numbers of a text, in order: "-1,234.5 and 7" has -1234.5 and 7."""
    for match in NUMBER.finditer(text.replace("−", "-")):
        yield Decimal(match.group().replace(",", ""))


def last_number(text: str) -> Decimal | None:
    """The last number of a text, if it has one."""
    last = last_match(NUMBER, text.replace("−", "-"))
    return None if last is None else Decimal(last.group().replace(",", ""))


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last place where a pattern matches, left to right, if there is one."""
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def number_text(number: Decimal | None) -> str | None:
    """A number's text, the same for equal numbers; None for None."""
    if number is None:
        return None
    text = f"{number:f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) if number else "0"


def to_number(ground_truth: Any) -> Decimal:
    """A ground truth that is a number, or text of exactly one.

    Raises:
        ValueError: it is neither.
    """
    text = str(ground_truth).strip().replace("−", "-")
    if not NUMBER.fullmatch(text):
        raise ValueError(f"the ground truth {ground_truth!r:.80} is not a number")
    return Decimal(text.replace(",", ""))
