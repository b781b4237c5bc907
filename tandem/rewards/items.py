"""A response to score, its score, and the reading of values that a user's function made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from tandem.observability.terminal import printable
from tandem.rewards.calling import told

SHOWN_CHARACTERS = 80  # how much of a value a message shows
WHY_CHARACTERS = 500  # how much of a reward's reason is kept
ANSWER_CHARACTERS = 10_000  # how much of an answer is kept


@dataclass(frozen=True, slots=True)
class Item:
    """A response to score.

    Attributes:
        data_source: where its prompt comes from.
        solution_str: the response's text.
        ground_truth: what the data file gives as such.
        extra_info: further facts of the data file's row.
        index: the row's number in the data files, for messages.
        columns: the row's columns that the reward reads, by name; "prompt" is as the data hold it.
        uid: the same for all responses to one prompt.
        token_ids: the response's tokens.
    """

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    index: int | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    uid: str = ""
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Scored:
    """A checked score.

    Attributes:
        score: finite.
        extra: the other finite numbers that came with it.
        answer: the answer that the response gives, as text; None if it gives none, or the reward reads none.
        reads_answers: whether the reward looks for one.
        failed: whether the reward failed, and the score stands for none.
        why: what the score is for, as `reason` keeps it; "" where the reward does not say.
    """

    score: float
    extra: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    reads_answers: bool = False
    failed: bool = False
    why: str = ""

    @property
    def right(self) -> bool:
        """Whether the reward says so (`acc`), else whether the score is at least 1."""
        return self.extra.get("acc", self.score) >= 1


def reason(said: str) -> str:
    """Return what is kept of a reward's reason: its beginning, without halves of surrogate pairs."""
    return said[:WHY_CHARACTERS].encode(errors="replace").decode()


def as_number(value: Any) -> float | None:
    """A plain number, a bool, or a zero-dimensional array or tensor as a float; None for anything else."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    try:
        return float(value) if isinstance(value, Real) else None
    except OverflowError:  # an integer beyond floats
        return math.inf


def shown(value: Any) -> str:
    """Return a value of the user's as a short text that a terminal may show."""
    try:
        part = value[:SHOWN_CHARACTERS] if isinstance(value, str | bytes | list | tuple) else value
        text = printable(repr(part)[:SHOWN_CHARACTERS])
    except BaseException as error:  # its __repr__ is the user's, or it is a number too long to write
        text = f"(its repr {told(error)})"
    return f"{type(value).__name__} {text}"
