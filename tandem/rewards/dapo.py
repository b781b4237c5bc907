r"""A reward for mathematics whose last line is "Answer: …", in the style of DAPO's data.

The score is 1 for the right answer, else -1.

Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv 2503.14476.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tandem.rewards.base import register_reward
from tandem.rewards.boxes import last_boxed
from tandem.rewards.expressions import same_as_any
from tandem.rewards.truths import truths

END_CHARACTERS = 300
"""The number of characters to search at the end of a response; the answer should be in the last line."""
LINE = re.compile(r"answer[ \t]*[*_]*[ \t]*:\s*([^\n]+)", re.IGNORECASE)


def answer(solution_str: str) -> str | None:
    """Return the answer at the end of a response; None if there is no answer.

    The answer is the text after the last "Answer:", or else the content of the last box.
    """
    end = solution_str[-END_CHARACTERS:]
    lines: list[str] = LINE.findall(end)
    if not lines:
        return last_boxed(end)
    return last_boxed(lines[-1]) or lines[-1].lstrip("}*_ \t").strip()


@register_reward("math_dapo", "math_dapo_reasoning", "math", "aime*", bounded=True)
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the score 1 if the response's answer equals the ground truth, else -1.

    The result also has "acc" (1 or 0) and "pred" (the answer).

    Raises:
        RewardError: The process that compares expressions cannot be started.
        ValueError: There is no ground truth.
    """
    golds = [last_boxed(text) or text for text in truths(ground_truth)]
    pred = answer(solution_str)
    right = same_as_any(golds, pred)
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred}
