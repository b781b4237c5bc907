"""Cut token sequences to a length limit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tandem.data.files import DataFiles
from tandem.data.validate import RowProblems
from tandem.errors import DataError

TRUNCATIONS = ("error", "left", "right", "middle")
"""The treatment of a sequence over the limit: an error, or its start, end or middle is cut off."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The length limit of sequences, and the treatment of longer sequences.

    Attributes:
        tokens: The largest number of tokens.
        field: The config key of the limit, for messages.
        truncation: One of `TRUNCATIONS`.
        drops: Whether longer sequences are left out instead.

    Raises:
        DataError: The truncation mode is unknown.
    """

    tokens: int
    field: str
    truncation: str = "error"
    drops: bool = False

    def __post_init__(self) -> None:
        if self.truncation not in TRUNCATIONS:
            raise DataError(
                "unknown truncation mode",
                field="data.truncation",
                got=self.truncation,
                expected=f"one of {', '.join(TRUNCATIONS)}",
            )

    def holds(self, length: int) -> bool:
        """Return whether a sequence of this length is kept, either completely or cut."""
        return length <= self.tokens or (self.truncation != "error" and not self.drops)

    def kept(self, lengths: np.ndarray, rows: np.ndarray, files: DataFiles) -> np.ndarray:
        """Return the indices of the sequences that are kept, (K) int64.

        Args:
            lengths: (S) The length of each sequence.
            rows: (S) The row number of each sequence.
            files: The rows, for messages.

        Raises:
            DataError: Rows exceed the limit and may be neither cut nor dropped (the error names the rows), or
                all rows are dropped.
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
        """Return the sequence, (T), cut to (min(T, limit)).

        The mode "left" keeps the end, "right" keeps the start, and "middle" keeps equally many tokens of the
        start and the end; with an odd limit, the end is one token longer. With "error", call `kept` first.
        """
        excess = len(values) - self.tokens
        if excess <= 0:
            return values
        assert self.truncation != "error"
        start = {"left": 0, "right": self.tokens, "middle": self.tokens // 2}[self.truncation]
        return np.concatenate([values[:start], values[start + excess :]])
