"""Grade-school word problems in the style of GSM8K, whose answers follow "####".

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
"""How much of a response's end "flexible" searches."""
METHODS = ("strict", "flexible")
WRAPPING = r"(?:\s|[*_`{(:=$£€¥₹]|\\[$(]|\\(?:boxed|fbox|text|textbf|mathbf)\{)*+"
"""Marks of a page, boxes and currencies before a number."""
ANNOUNCED = (
    r"(?:[ \t*_`$]*+(?i:(?:so|thus|hence|therefore),?[ ]+)?"
    r"(?:(?i:(?:the[ ]+)?(?:(?:final|correct|right|total)[ ]+)?"
    r"(?:answer|result|total|solution|sum|number)|it)[ *_]*(?:is|equals|=|:)|[A-Za-z][ $*]*=))?"
)
"""What may announce the answer: "The answer is", "x ="."""
AFTER_MARKER = re.compile(rf"{ANNOUNCED}{WRAPPING}{SIGN}(?:{WRAPPING}){VALUE}")
MARKER = re.compile("####")


def answer(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> Quantity | None:
    """The number a response answers with, if any: "strict" takes that right after the last "####" that has
    one, "flexible" the last of the response's end.

    Raises:
        ValueError: the method is neither.
    """
    if method not in METHODS:
        raise ValueError(f"the method {method!r} is none of {', '.join(METHODS)}")
    if method == "flexible":
        return last_quantity(readable(solution_str[-MAX_TAIL_CHARACTERS:]))
    text, last = readable(solution_str), None
    for marker in MARKER.finditer(text):
        last = AFTER_MARKER.match(text, marker.end()) or last
    return None if last is None else quantity(last)


def answer_text(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """The text of the number a response answers with, if any."""
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
    """1 for the right number, else 0. The ground truth is a number, a solution with "####" before it, or a
    list of those of which any will do.

    Raises:
        ValueError: the ground truth is none of these.
    """
    golds = [Quantity(to_number(text.rpartition("####")[2])) for text in truths(ground_truth)]
    found = answer(solution_str, method)
    return float(found is not None and any(map(found.near, golds)))
