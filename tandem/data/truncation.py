"""Token sequences to a length limit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tandem.data.files import DataFiles
from tandem.data.validate import RowProblems
from tandem.errors import DataError

TRUNCATIONS = ("error", "left", "right", "middle")
"""What happens to a sequence over the limit: refused; its beginning, end or middle cut off."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of sequences' lengths, and what happens to longer ones.

    Attributes:
        tokens: the limit.
        field: the key that says so, for messages.
        truncation: one of `TRUNCATIONS`.
        drops: leave longer ones out instead.

    Raises:
        DataError: no such truncation.
    """

    tokens: int
    field: str
    truncation: str = "error"
    drops: bool = False

    def __post_init__(self) -> None:
        if self.truncation not in TRUNCATIONS:
            raise DataError(
                "no such truncation mode",
                field="data.truncation",
                got=self.truncation,
                expected=f"one of {', '.join(TRUNCATIONS)}",
            )

    def holds(self, length: int) -> bool:
        """Whether a sequence of this length is within it, or cut to it."""
        return length <= self.tokens or (self.truncation != "error" and not self.drops)

    def kept(self, lengths: np.ndarray, rows: np.ndarray, files: DataFiles) -> np.ndarray:
        """(K) int64: which sequences stay, of (S) `lengths`, made of (S) `rows`.

        Raises:
            DataError: rows over the limit that are to be neither cut nor left out, by name; or no row stays.
        """
        if not self.drops and self.truncation == "error":
            problems = RowProblems(files.where)
            numbers, places = np.unique(rows, return_inverse=True)
            longest = np.zeros(len(numbers), np.int64)
            np.maximum.at(longest, places, lengths)
            for at in np.flatnonzero(longest > self.tokens).tolist():
                problems.add(int(numbers[at]), f"{longest[at]} tokens")
            problems.raise_if_any(
                f"of {len(numbers)} are over the length limit",
                field=self.field,
                expected=f"at most {self.tokens} tokens; the longest has {lengths.max()}",
                remedy=f"raise {self.field}, or set data.filter_overlong_prompts=True (drops prompts) or "
                "data.truncation=left|right|middle (cuts them)",
            )
        if not self.drops:
            return np.arange(len(lengths))
        kept = np.flatnonzero(lengths <= self.tokens)
        if not len(kept):
            raise DataError(
                f"all {len(lengths)} prompts are over the length limit and were filtered out",
                field="data.filter_overlong_prompts",
                got=f"prompts of {lengths.min()} to {lengths.max()} tokens in {files.names}",
                expected=f"at least one of at most {self.tokens} tokens",
                remedy=f"raise {self.field} (now {self.tokens})",
            )
        return kept

    def cut(self, values: np.ndarray) -> np.ndarray:
        """(T) to (min(T, limit)): "left" keeps the end, "right" the beginning, "middle" half of each (of an
        odd limit one more of the end). With "error", `kept` has been called before."""
        excess = len(values) - self.tokens
        if excess <= 0:
            return values
        assert self.truncation != "error"
        start = {"left": 0, "right": self.tokens, "middle": self.tokens // 2}[self.truncation]
        return np.concatenate([values[:start], values[start + excess :]])
