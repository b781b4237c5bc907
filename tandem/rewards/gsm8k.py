"""Grade-school word problems in the style of GSM8K, whose answers follow "####".

Cobbe et al., "Training Verifiers to Solve Math Word Problems", arXiv 2110.14168.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, DivisionByZero, InvalidOperation
from typing import Any, Literal

from tandem.rewards.base import register_reward
from tandem.rewards.numbers import NUMBER, last_match, number_text, to_number
from tandem.rewards.truths import truths

MAX_TAIL_CHARACTERS = 10_000
"""How much of a response's end "flexible" searches."""
METHODS = ("strict", "flexible")
WRAPPING = r"(?:\s|[*_`{(=:$£€¥₹]|\\[$(]|\\(?:boxed|fbox|text|textbf|mathbf)\{)*+"
"""Marks of a page, boxes and currencies before a number."""
BLANK = "(?:[ \u00a0\u2009\u202f]|\\\\[,;: ]|\\{,\\}|,\\\\!)"
"""What sets groups of three digits apart, besides a comma."""
GROUPED = rf"(?:(?<![\w)\]}}])[-+])?[0-9]{{1,3}}(?:{BLANK}[0-9]{{3}})+(?![0-9])(?:\.[0-9]+)?"
WRITTEN = rf"(?P<number>(?>{GROUPED}|{NUMBER.pattern}))(?:/(?P<divisor>[0-9]+)(?![0-9.]))?"
"""A number, or a fraction of whole ones."""
CURRENCY = r"[$£€¥₹\\{]"
AFTER_MARKER = re.compile(rf"\s*+(?:(?P<sign>-)(?={CURRENCY}))?{WRAPPING}{WRITTEN}")
ANYWHERE = re.compile(rf"(?<![0-9])(?<![0-9][.,])(?:(?P<sign>-){CURRENCY})?{WRITTEN}")
GOES_ON = re.compile(
    r"\s*(?:(?:[+*/^=×÷·<>]|-(?=[0-9])|\\(?:times|cdot|div))\s*[0-9(.\\]|(?:,|or\b)\s*[-$£€¥₹]*[0-9])"
)
"""What makes a number the first part of an expression, or of several answers."""
MARKER = re.compile("####")


def answer(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> Decimal | None:
    """The number a response answers with, if any: "strict" takes that right after the last "####" that has
    one, "flexible" the last of the response's end.

    Raises:
        ValueError: the method is neither.
    """
    if method not in METHODS:
        raise ValueError(f"the method {method!r} is none of {', '.join(METHODS)}")
    text = solution_str.replace("−", "-")
    if method == "flexible":
        text = text[-MAX_TAIL_CHARACTERS:]
        last = last_match(ANYWHERE, text)
    else:
        last = None
        for marker in MARKER.finditer(text):
            last = AFTER_MARKER.match(text, marker.end()) or last
    if last is None or GOES_ON.match(text, last.end()):
        return None
    return _value(last)


def _value(written: re.Match[str]) -> Decimal | None:
    number = Decimal(re.sub(r"[^0-9.eE+-]", "", written["number"]))
    if written["divisor"]:
        try:
            number /= Decimal(written["divisor"])
        except (DivisionByZero, InvalidOperation):
            return None
    return number.copy_negate() if written["sign"] else number


@register_reward(
    "openai/gsm8k*",
    "gsm8k*",
    answer=lambda text, method="strict": number_text(answer(text, method)),
    bounded=True,
)
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
) -> float:
    """1 for the right number, else 0. The ground truth is a number, a solution with "####" before it, or a
    list of those of which any will do.

    Raises:
        ValueError: the ground truth is none of these.
    """
    golds = [to_number(text.rpartition("####")[2]) for text in truths(ground_truth)]
    return float(answer(solution_str, method) in golds)
