r"""A reward for mathematics with boxed answers, in the style of MATH.

A response is correct if its last \boxed{…} equals the ground truth; see tandem.rewards.expressions.

Hendrycks et al., "Measuring Mathematical Problem Solving With the MATH Dataset", arXiv 2103.03874. The
NuminaMath sources are from PRIME's data, whose prompts also ask for a box (Cui et al., arXiv 2502.01456).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.rewards.base import register_reward
from tandem.rewards.boxes import last_boxed
from tandem.rewards.expressions import same_as_any
from tandem.rewards.truths import truths


@register_reward(
    "lighteval/MATH*",
    "DigitalLearningGmbH/MATH-lighteval*",
    "HuggingFaceH4/MATH-500*",
    "HuggingFaceH4/aime*",
    "MATH",
    "numina_aops_forum",
    "numina_synthetic_math",
    "numina_amc_aime",
    "numina_synthetic_amc",
    "numina_cn_k12",
    "numina_olympiads",
    answer=last_boxed,
    bounded=True,
)
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """Return 1 if the response's boxed answer equals the ground truth, else 0.

    The ground truth is an expression, a solution with a boxed expression, or a list of such alternatives.

    Raises:
        RewardError: The process that compares expressions cannot be started.
        ValueError: There is no ground truth.
    """
    golds = [last_boxed(text) or text for text in truths(ground_truth)]
    return float(same_as_any(golds, last_boxed(solution_str)))
