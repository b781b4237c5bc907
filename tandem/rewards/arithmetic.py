"""Arithmetic problems: right if the answer is exactly the number.

The answer is the number after the last "####"; without that the number after the last "="; without that the
last number of the response. A marker without a number after it is a wrong answer. Numbers are read as
tandem.rewards.numbers does, and compared by value, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.rewards.base import register_reward
from tandem.rewards.numbers import ANYWHERE, Quantity, last_quantity, quantity, readable, to_number


def answer(solution_str: str) -> Quantity | None:
    """The number a response answers with, if any."""
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
    """1 for the right number, else 0.

    Raises:
        ValueError: the ground truth is no number.
    """
    truth, found = Quantity(to_number(ground_truth)), answer(solution_str)
    return float(found is not None and found.near(truth))
