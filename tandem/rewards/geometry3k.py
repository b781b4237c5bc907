r"""A reward for geometry problems whose answers are boxed after a <think> section.

The right answer gives 0.9 of the score, and the right format gives 0.1.

Lu et al., "Inter-GPS: Interpretable Geometry Problem Solving", arXiv 2105.04165. Only text is scored here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.rewards.base import register_reward
from tandem.rewards.boxes import last_boxed
from tandem.rewards.expressions import same_as_any
from tandem.rewards.truths import truths

FORM_WEIGHT = 0.1
FORM = ("<think>", "</think>", "\\boxed{", "}")
"""The patterns that a well-formed response must match in this order, starting at its beginning."""


def well_formed(solution_str: str) -> bool:
    """Return whether a response starts with a think section and boxes an answer after it."""
    if not solution_str.startswith(FORM[0]):
        return False
    place = 0
    for part in FORM:
        place = solution_str.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


@register_reward("hiyouga/geometry3k*", bounded=True)
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the score: 0.9 for the right answer, plus 0.1 for the right format.

    The result also has "acc" and "format" (1 or 0) and "pred" (the answer).

    Raises:
        RewardError: The process that compares expressions cannot be started.
        ValueError: There is no ground truth.
    """
    golds = truths(ground_truth)
    pred = last_boxed(solution_str)
    right = same_as_any(golds, pred)
    form = well_formed(solution_str)
    score = (1 - FORM_WEIGHT) * right + FORM_WEIGHT * form
    return {"score": score, "acc": float(right), "format": float(form), "pred": pred}
