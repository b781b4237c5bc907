"""A reward for the problems of `tandem.tasks`, scored by reasoning-gym."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.rewards.base import register_reward
from tandem.tasks import PREFIX, parse


@register_reward(f"{PREFIX}*")
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, Any]:
    """Return reasoning-gym's score of a response, from 0 to 1; 0 if the response has no answer."""
    task = parse(str(extra_info["task"]))
    answer = task.answer(solution_str)
    score = 0.0 if answer is None else task.score(answer, int(extra_info["index"]))
    return {"score": score, "pred": answer}
