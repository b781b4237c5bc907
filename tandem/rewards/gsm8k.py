"""Grade-school word problems in the style of GSM8K, whose answers follow "####".

Cobbe et al., "Training Verifiers to Solve Math Word Problems", arXiv 2110.14168.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Literal

from tandem.rewards.base import register_reward
from tandem.rewards.numbers import NUMBER, last_number, number_text, to_number

STRICT = re.compile(r"####\s*(?:\$\s*)?(" + NUMBER.pattern + ")")


def answer(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> Decimal | None:
    """The number a response answers with, if any: "strict" takes that of the last "#### n", "flexible"
    the response's last number."""
    if method == "flexible":
        return last_number(solution_str)
    texts = STRICT.findall(solution_str.replace("−", "-"))
    return to_number(texts[-1]) if texts else None


@register_reward("openai/gsm8k*", "gsm8k*", answer=lambda text: number_text(answer(text)))
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
) -> float:
    """1 for the right number, else 0. The ground truth is a number, or a solution with "####" before it.

    Raises:
        ValueError: the ground truth is neither.
    """
    return float(answer(solution_str, method) == to_number(str(ground_truth).rpartition("####")[2]))
