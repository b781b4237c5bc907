"""A reward for questions answered with a search engine, with the answer between <answer> tags.

The score is 1 if the answer equals a right answer.

Jin et al., "Search-R1: Training LLMs to Reason and Leverage Search Engines with Reinforcement Learning",
arXiv 2503.09516. Answers are compared as in SQuAD (Rajpurkar et al., arXiv 1606.05250): without case,
punctuation and articles. This is an exact match, not an F1 score.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from tandem.rewards.base import register_reward
from tandem.rewards.truths import truths

OPEN, CLOSE = "<answer>", "</answer>"
MAX_TAGS = 10
SHARE_WITH_MORE_TAGS = 0.25
"""The score of a correct answer in a response with more than MAX_TAGS opening or closing tags."""
ARTICLE = re.compile(r"\b(?:a|an|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def answer(solution_str: str) -> str | None:
    """Return the text in the last pair of <answer> tags; None if there are no such tags."""
    start = solution_str.rfind(OPEN, 0, max(0, solution_str.rfind(CLOSE)))
    if start < 0:
        return None
    start += len(OPEN)
    return solution_str[start : solution_str.index(CLOSE, start)].strip()


def normalized(text: str) -> str:
    """Return text in lower case without punctuation and articles, with single spaces between words.

    If the result would be empty, as for "A" or "!!!", articles and punctuation are kept.
    """
    lower = text.lower()
    words = ARTICLE.sub(" ", lower.translate(WITHOUT_PUNCTUATION)).split()
    return " ".join(words or lower.split())


@register_reward(
    "searchR1_nq",
    "searchR1_triviaqa",
    "searchR1_popqa",
    "searchR1_hotpotqa",
    "searchR1_2wikimultihopqa",
    "searchR1_musique",
    "searchR1_bamboogle",
    bounded=True,
)
def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the score 1 for a correct answer (0.25 if the response has more than ten tags), else 0.

    The result also has "acc" (1 or 0) and "pred" (the answer). The ground truth is one answer, a list of
    answers, or a mapping whose "target" is an answer or a list of answers.

    Raises:
        ValueError: There is no ground truth.
    """
    golds = truths(ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth)
    pred = answer(solution_str)
    right = bool(pred) and normalized(str(pred)) in map(normalized, golds)
    crowded = max(solution_str.count(OPEN), solution_str.count(CLOSE)) > MAX_TAGS
    share = SHARE_WITH_MORE_TAGS if crowded else 1.0
    return {"score": share * right, "acc": float(right), "pred": pred}
