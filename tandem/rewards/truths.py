"""Read the right answers from a row of data. A row may have several alternative answers."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any


def truths(ground_truth: Any) -> list[str]:
    """Return the right answers as text, at least one.

    Args:
        ground_truth: Text, a number, or a list, tuple or array of these.

    Raises:
        ValueError: The ground truth has another type (such as a mapping) or is empty: None, blank text, an
            empty list.
    """
    if isinstance(ground_truth, str | Number):
        several: list[Any] = [ground_truth]
    elif isinstance(ground_truth, Mapping) or not hasattr(ground_truth, "__iter__"):
        raise ValueError(
            f"the ground truth {ground_truth!r:.80} is neither text, nor a number, nor a list of these"
        )
    else:
        several = list(ground_truth)
    if not several or not all(isinstance(one, str | Number) and str(one).strip() for one in several):
        raise ValueError(f"the ground truth {ground_truth!r:.80} has no answer, or an empty one")
    return [str(one).strip() for one in several]
