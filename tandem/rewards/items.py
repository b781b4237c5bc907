"""Classes for a response and its score, and functions that convert the results of a user's function."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from tandem.observability.terminal import printable
from tandem.rewards.calling import describe_error

SHOWN_CHARACTERS = 80  # how many characters of a value a message shows
WHY_CHARACTERS = 500  # how many characters of a score's explanation are kept
ANSWER_CHARACTERS = 10_000  # how many characters of an answer are kept


@dataclass(frozen=True, slots=True)
class Item:
    """A response to score.

    Attributes:
        data_source: The data source of the prompt.
        solution_str: The text of the response.
        ground_truth: The ground truth in the data.
        extra_info: The column `extra_info` of the data row.
        index: The row number in the data, for messages.
        columns: A dict from name to value, for the columns of the row that the reward reads. "prompt" is the
            prompt as in the data.
        uid: An id that all responses to the same prompt share.
        token_ids: The tokens of the response.
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
        score: The score, a finite number.
        extra: The other finite numbers that the function returned.
        answer: The answer in the response, as text; None if the response has no answer, or if the reward does
            not look for an answer.
        reads_answers: Whether the reward looks for an answer.
        failed: Whether the reward failed, so that the score is only a placeholder.
        why: An explanation of the score, shortened with `reason`; "" if the reward gives no explanation.
    """

    score: float
    extra: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    reads_answers: bool = False
    failed: bool = False
    why: str = ""

    @property
    def right(self) -> bool:
        """Whether the response is correct: `acc` if the reward returns it, else a score of at least 1."""
        return self.extra.get("acc", self.score) >= 1


def reason(text: str) -> str:
    """Shorten an explanation to its beginning, without unpaired surrogates."""
    return text[:WHY_CHARACTERS].encode(errors="replace").decode()


def as_number(value: Any) -> float | None:
    """Convert a number, a bool, or a zero-dimensional array or tensor to a float; None for anything else."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    try:
        return float(value) if isinstance(value, Real) else None
    except OverflowError:  # an integer too large for a float
        return math.inf


def shown(value: Any) -> str:
    """Return a value from the user's code as short text that is safe to print on a terminal."""
    try:
        part = value[:SHOWN_CHARACTERS] if isinstance(value, str | bytes | list | tuple) else value
        text = printable(repr(part)[:SHOWN_CHARACTERS])
    except BaseException as error:  # __repr__ is the user's code, or the number is too long to print
        text = f"(its repr {describe_error(error)})"
    return f"{type(value).__name__} {text}"
