"""Arithmetic problems: right if the answer is exactly the number.

The answer is the first number after the last "####"; without that the first number after the last "=";
without that the last number of the response. A marker without a number after it is a wrong answer.
Numbers may have a sign, thousands' commas and decimals; they are compared by value, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from tandem.rewards.base import register_reward
from tandem.rewards.numbers import last_number, number_text, numbers_in, to_number


def answer(solution_str: str) -> Decimal | None:
    """The number a response answers with, if any."""
    for marker in ("####", "="):
        _, found, after = solution_str.rpartition(marker)
        if found:
            return next(numbers_in(after), None)
    return last_number(solution_str)


@register_reward("arithmetic*", answer=lambda text: number_text(answer(text)), bounded=True)
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """1 for the right number, else 0.

    Raises:
        ValueError: the ground truth is no number.
    """
    return float(answer(solution_str) == to_number(ground_truth))
