"""A reward for arithmetic problems: correct if the answer is exactly the right number.

The answer is the number after the last "####". If there is no "####", it is the number after the last "=". If
there is no "=" either, it is the last number of the response. If a marker has no number after it, the answer
is wrong. Numbers are parsed by tandem.rewards.numbers, and their values are compared exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.rewards.base import register_reward
from tandem.rewards.numbers import ANYWHERE, Quantity, last_quantity, quantity, readable, to_number


def answer(solution_str: str) -> Quantity | None:
    """Return the number that is the answer of a response; None if the response has no such number."""
    text = readable(solution_str)
    for marker in ("####", "="):
        before, found, _ = text.rpartition(marker)
        if found:
            number = ANYWHERE.search(text, len(before) + len(marker))
            return number and quantity(number)
    return last_quantity(text)


@register_reward("arithmetic*", answer=answer, bounded=True)
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """Return 1 if the response's answer is the right number, else 0.

    Raises:
        ValueError: The ground truth is not a number.
    """
    truth, found = Quantity(to_number(ground_truth)), answer(solution_str)
    return float(found is not None and found.near(truth))
