"""Table: the operations that indices and layouts share, by which one table is made of others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Self

import numpy as np

from tandem.balance import even
from tandem.errors import DataError
from tandem.protocol.ragged import RowIndex


class Table(ABC):
    """B rows of named columns, of which something is known, but not the values. The operations return new
    tables and check what every table can; what is known of the result is the subclass's to say."""

    __slots__ = ()
    columns: Collection[str]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, rows: RowIndex) -> Self:
        """The named rows in the given order; a boolean mask filters."""

    def select(self, columns: Sequence[str]) -> Self:
        """Only the named columns.

        Raises:
            DataError: a name that is not there.
        """
        for name in columns:
            if name not in self.columns:
                raise DataError("no such column", field=name, expected=tuple(self.columns))
        return self._only(columns)

    def union(self, *others: Self) -> Self:
        """The columns of all tables side by side.

        Raises:
            DataError: row counts differ, or what is known of one column or sample.
        """
        first, *rest = sorted((self, *others), key=lambda table: not table.columns)  # B is not a bare one's
        for table in rest:
            if table.columns and len(table) != len(first):
                raise DataError(
                    "batches of different size",
                    got=f"{len(table)} rows: {', '.join(table.columns)}",
                    expected=f"{len(first)} rows: {', '.join(first.columns)}",
                )
        return first._beside(rest)

    def concat(self, *others: Self) -> Self:
        """The rows of all tables below each other, counted anew. A table without any column is what a worker
        may return for an empty share, and is left out where others have columns.

        Raises:
            DataError: tables with different columns.
        """
        first, *rest = [table for table in (self, *others) if table.columns] or [self, *others]
        for table in rest:
            if set(table.columns) != set(first.columns):
                raise DataError(
                    "batches have different columns", got=tuple(table.columns), expected=tuple(first.columns)
                )
        return first._below(rest)

    def chunk(self, i: int, n: int) -> Self:
        """Share i of n successive ones whose sizes differ by one at most."""
        return self[even(len(self), n)[i]]

    def share(self, division: Sequence[np.ndarray], i: int) -> Self:
        """Share i of a division, which holds the rows of each share.

        Raises:
            DataError: a division of another number of rows.
        """
        _check_size(len(self), sum(map(len, division)), "a batch")
        return self[division[i]]

    def restore(self, division: Sequence[np.ndarray], *others: Self) -> Self:
        """Puts together what became of a division's shares, this table of the first, in the order before it.

        Raises:
            DataError: a table of another size than its share.
        """
        for i, (table, rows) in enumerate(zip((self, *others), division, strict=True)):
            _check_size(len(table), len(rows), f"the result of share {i}")
        return self.concat(*others)[np.argsort(np.concatenate(division))].concat()

    @abstractmethod
    def _only(self, columns: Sequence[str]) -> Self:
        """This table with some of its columns."""

    @abstractmethod
    def _beside(self, others: Sequence[Self]) -> Self:
        """This table and others of as many rows, or of no column, side by side."""

    @abstractmethod
    def _below(self, others: Sequence[Self]) -> Self:
        """This table and others of the same columns below each other."""


def _check_size(got: int, expected: int, what: str) -> None:
    if got != expected:
        raise DataError(
            f"{what} has another number of rows than the division it belongs to",
            got=f"{got} rows",
            expected=f"{expected} rows",
            remedy="a method registered with balance returns one row for each row it gets",
        )
