"""The right answers that a row of data names: one, or several of which any will do."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any


def truths(ground_truth: Any) -> list[str]:
    """The right answers as text, at least one.

    Args:
        ground_truth: text, a number, or a list, tuple or array of them.

    Raises:
        ValueError: it is anything else, or nothing: None, blank text, an empty list, a mapping.
    """
    if isinstance(ground_truth, str | Number):
        several: list[Any] = [ground_truth]
    elif isinstance(ground_truth, Mapping) or not hasattr(ground_truth, "__iter__"):
        raise ValueError(
            f"the ground truth {ground_truth!r:.80} is neither text, a number, nor a list of them"
        )
    else:
        several = list(ground_truth)
    if not several or not all(isinstance(one, str | Number) and str(one).strip() for one in several):
        raise ValueError(f"the ground truth {ground_truth!r:.80} names no answer, or an empty one")
    return [str(one).strip() for one in several]
