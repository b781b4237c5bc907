"""A reward for grade-school word problems in the style of GSM8K, whose answers follow "####".

Cobbe et al., "Training Verifiers to Solve Math Word Problems", arXiv 2110.14168.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from tandem.rewards.base import register_reward
from tandem.rewards.numbers import SIGN, VALUE, Quantity, last_quantity, quantity, readable, to_number
from tandem.rewards.truths import truths

MAX_TAIL_CHARACTERS = 10_000
"""The number of characters at the end of a response that the method "flexible" searches."""
METHODS = ("strict", "flexible")
WRAPPING = r"(?:\s|[*_`{(:=$£€¥₹]|\\[$(]|\\(?:boxed|fbox|text|textbf|mathbf)\{)*+"
"""Markup, boxes and currency signs before a number."""
ANNOUNCED = (
    r"(?:[ \t*_`$]*+(?i:(?:so|thus|hence|therefore),?[ ]+)?"
    r"(?:(?i:(?:the[ ]+)?(?:(?:final|correct|right|total)[ ]+)?"
    r"(?:answer|result|total|solution|sum|number)|it)[ *_]*(?:is|equals|=|:)|[A-Za-z][ $*]*=))?"
)
"""Words that may announce the answer, such as "The answer is" or "x ="."""
AFTER_MARKER = re.compile(rf"{ANNOUNCED}{WRAPPING}{SIGN}(?:{WRAPPING}){VALUE}")
MARKER = re.compile("####")


def answer(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> Quantity | None:
    """Return the number that is the answer of a response; None if the response has no such number.

    Args:
        solution_str: The response.
        method: "strict" returns the number after the last "####" that is directly followed by a number.
            "flexible" returns the last number near the end of the response.

    Raises:
        ValueError: The method is neither "strict" nor "flexible".
    """
    if method not in METHODS:
        raise ValueError(f"the method {method!r} is not one of {', '.join(METHODS)}")
    if method == "flexible":
        return last_quantity(readable(solution_str[-MAX_TAIL_CHARACTERS:]))
    text, last = readable(solution_str), None
    for marker in MARKER.finditer(text):
        last = AFTER_MARKER.match(text, marker.end()) or last
    return None if last is None else quantity(last)


def answer_text(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """Return the number of `answer` as text; None if the response has no such number."""
    found = answer(solution_str, method)
    return None if found is None else str(found)


@register_reward("openai/gsm8k*", "gsm8k*", answer=answer, bounded=True)
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
) -> float:
    """Return 1 if the response's answer is the right number, else 0.

    The ground truth is a number, a solution with "####" before the number, or a list of such alternatives.

    Raises:
        ValueError: The ground truth has another type.
    """
    golds = [Quantity(to_number(text.rpartition("####")[2])) for text in truths(ground_truth)]
    found = answer(solution_str, method)
    return float(found is not None and any(map(found.near, golds)))
