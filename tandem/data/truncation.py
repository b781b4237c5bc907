"""Token sequences to a length limit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tandem.data.validate import RowProblems
from tandem.errors import DataError

TRUNCATIONS = ("error", "left", "right", "middle")
"""What happens to a sequence over the limit: refused; its beginning, end or middle cut off."""


def check_truncation(truncation: str) -> None:
    """
    Raises:
        DataError: no such mode.
    """
    if truncation not in TRUNCATIONS:
        raise DataError(
            "no such truncation mode",
            field="data.truncation",
            got=truncation,
            expected=f"one of {', '.join(TRUNCATIONS)}",
        )


def cut(values: np.ndarray, limit: int, truncation: str) -> np.ndarray:
    """(T) to (min(T, limit)): "left" keeps the end, "right" the beginning, "middle" half of each (of an
    odd limit one more of the end). With "error", `refuse_long` has been called before."""
    excess = len(values) - limit
    if excess <= 0:
        return values
    assert truncation != "error"
    start = {"left": 0, "right": limit, "middle": limit // 2}[truncation]
    return np.concatenate([values[:start], values[start + excess :]])


def refuse_long(lengths: np.ndarray, limit: int, where: Callable[[int], str], *, field: str) -> None:
    """
    Raises:
        DataError: rows longer than `limit` tokens; names them and their lengths.
    """
    problems = RowProblems(where)
    for row in np.flatnonzero(lengths > limit).tolist():
        problems.add(row, f"{lengths[row]} tokens")
    problems.raise_if_any(
        f"of {len(lengths)} are over the length limit",
        field=field,
        expected=f"at most {limit} tokens; the longest has {lengths.max()}",
        remedy=f"raise {field}, or set data.filter_overlong_prompts=True (drops prompts) or "
        "data.truncation=left|right|middle (cuts them)",
    )
