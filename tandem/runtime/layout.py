"""Layout: for each column of a table, the results that have the rows, and the row numbers in them.

Every step of evaluating an expression except the last step works only on layouts and needs no values. The
last step reads the values from the results, or reads the indices of the results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tandem.balance import even
from tandem.errors import DataError
from tandem.protocol import DataProto
from tandem.protocol.equality import same
from tandem.protocol.gather import Gather, Picks
from tandem.protocol.ragged import RowIndex, picks
from tandem.runtime.handle import Source
from tandem.runtime.index import Index, shared


@dataclass(frozen=True, slots=True, eq=False)
class Strip:
    """A selection of rows from concatenated results; several columns of a table can share one strip.

    Attributes:
        sources: The results, at least one.
        sizes: The number of rows of each result.
        picks: The selected row numbers in the concatenated rows of all results.
    """

    sources: tuple[Source, ...]
    sizes: tuple[int, ...]
    picks: Picks

    def __getitem__(self, rows: Picks) -> Strip:
        return Strip(self.sources, self.sizes, _composed(self.picks, rows))

    def same(self, other: Strip) -> bool:
        """Return whether both strips select the same rows of the same results."""
        return self.sources == other.sources and same(self.picks, other.picks)

    def needed(self) -> Strip:
        """Leave out results without selected rows; if no rows are selected, keep only the smallest result."""
        if len(self.sources) == 1 and isinstance(self.picks, range):
            return self
        sizes = np.asarray(self.sizes)
        if len(self.picks) == 0:
            smallest = int(sizes.argmin())
            return Strip((self.sources[smallest],), (self.sizes[smallest],), range(0))
        ends = np.cumsum(sizes)
        wanted = _array(self.picks)
        used, place = np.unique(np.searchsorted(ends, wanted, side="right"), return_inverse=True)
        shifts = (ends - sizes)[used] - (np.cumsum(sizes[used]) - sizes[used])
        rows = _numbered(wanted - shifts[place])
        return Strip(tuple(self.sources[i] for i in used), tuple(self.sizes[i] for i in used), rows)

    def take(self, names: Sequence[str], fetch: Callable[[Source], DataProto]) -> DataProto:
        """Return the values of the named columns.

        The values are copied if the memory of a source is borrowed.
        """
        strip = self.needed()
        tables = []
        for source in strip.sources:
            table = fetch(source)
            arrays = [name for name in names if name in table.non_tensor_batch]
            tables.append(table.select([name for name in names if name not in arrays], arrays))
        taken = DataProto.gather(tables, strip.picks)
        view = len(strip.sources) == 1 and isinstance(strip.picks, range)
        return taken.clone() if view and strip.sources[0].handle.borrowed else taken


Strips = tuple[Strip, ...]
"""The strips that have a column. If several tables of a union have it, there is one strip per table.

The values of all strips must be equal.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The layout of a table of B rows. All operations return new layouts.

    Attributes:
        row_ids: (B) The row number of each row in the table that was last concatenated or returned by a
            method.
        columns: The strips of each column.
        samples: The strips of the samples' uids, which `select` keeps.
        bare: Results without columns. The layout keeps these results because of their meta_info.
    """

    row_ids: Picks
    columns: dict[str, Strips]
    samples: Strips = ()
    bare: tuple[Source, ...] = ()

    @classmethod
    def of(cls, source: Source, timeout_s: float | None) -> Layout:
        """Return the layout of all rows of a result."""
        rows, columns = source.shape or (len(source.index(timeout_s)), source.index(timeout_s).columns)
        strip = Strip((source,), (rows,), range(rows))
        samples = (strip,) if "uid" in columns else ()
        return cls(range(rows), {name: (strip,) for name in columns}, samples, () if columns else (source,))

    def __len__(self) -> int:
        return len(self.row_ids)

    def __getitem__(self, rows: RowIndex) -> Layout:
        """Return the rows with the given row numbers, in the given order; a boolean mask filters rows."""
        wanted = picks(rows, len(self))
        taken = functools.cache(lambda strip: strip[wanted])
        return replace(
            self,
            row_ids=_composed(self.row_ids, wanted),
            columns={name: tuple(map(taken, strips)) for name, strips in self.columns.items()},
            samples=tuple(map(taken, self.samples)),
        )

    def select(self, columns: Sequence[str]) -> Layout:
        """Return only the named columns.

        Raises:
            DataError: A named column does not exist.
        """
        for name in columns:
            if name not in self.columns:
                raise DataError("no such column", field=name, expected=tuple(self.columns))
        return replace(self, columns={name: self.columns[name] for name in columns})

    def union(self, *others: Layout) -> Layout:
        """Return a table with the columns of all tables.

        Raises:
            DataError: The tables have different numbers of rows.
        """
        # Tables without columns come last, because they do not determine the number of rows.
        first, *rest = sorted((self, *others), key=lambda table: not table.columns)
        columns, samples, bare = dict(first.columns), first.samples, first.bare
        for table in rest:
            if table.columns and len(table) != len(first):
                raise DataError(
                    "the batches have different sizes",
                    got=f"{len(table)} rows: {', '.join(table.columns)}",
                    expected=f"{len(first)} rows: {', '.join(first.columns)}",
                )
            for name, strips in table.columns.items():
                columns[name] = _beside(columns.get(name, ()), strips)
            samples = _beside(samples, table.samples)
            bare += table.bare
        return Layout(first.row_ids, columns, samples, bare)

    def concat(self, *others: Layout) -> Layout:
        """Return the concatenated rows of all tables, numbered from 0.

        A worker without rows may return a table without columns. Such a table is left out if other tables
        have columns.

        Raises:
            DataError: The tables have different columns.
        """
        parts = [table for table in (self, *others) if table.columns] or [self, *others]
        first = parts[0].columns
        for table in parts[1:]:
            if set(table.columns) != set(first):
                raise DataError(
                    "the batches have different columns", got=tuple(table.columns), expected=tuple(first)
                )
        joined = functools.cache(_joined)

        def below(sides: Sequence[Strips]) -> Strips:
            most = max(map(len, sides)) if all(sides) else 0
            return tuple(joined(tuple(side[min(i, len(side) - 1)] for side in sides)) for i in range(most))

        return Layout(
            range(sum(map(len, parts))),
            {name: below([part.columns[name] for part in parts]) for name in first},
            below([part.samples for part in parts]),
            tuple(dict.fromkeys(source for part in parts for source in part.bare)),
        )

    def chunk(self, i: int, n: int) -> Layout:
        """Return chunk i of n contiguous chunks whose sizes differ by at most one."""
        return self[even(len(self), n)[i]]

    def share(self, division: Sequence[np.ndarray], i: int) -> Layout:
        """Return the rows of group i of a division, which lists the row numbers of each group.

        Raises:
            DataError: The division and the table have different numbers of rows.
        """
        _check_size(len(self), sum(map(len, division)), "a batch")
        return self[division[i]]

    def restore(self, division: Sequence[np.ndarray], *others: Layout) -> Layout:
        """Concatenate the results for the groups of a division, in the row order before the division.

        This table is the result of the first group.

        Raises:
            DataError: A result and its group have different numbers of rows.
        """
        for i, (table, rows) in enumerate(zip((self, *others), division, strict=True)):
            _check_size(len(table), len(rows), f"the result of share {i}")
        return self.concat(*others)[np.argsort(np.concatenate(division))].concat()

    def strips(self) -> dict[Strip, list[str]]:
        """Return a dict from strip to the names of its columns.

        The strip that provides a column's values comes before other strips of this column, whose values must
        be equal.
        """
        out: dict[Strip, list[str]] = {}
        for rank in range(max(map(len, self.columns.values()), default=0)):
            for name, strips in self.columns.items():
                if rank < len(strips):
                    out.setdefault(strips[rank], []).append(name)
        return out

    def take(self, fetch: Callable[[Source], DataProto]) -> DataProto:
        """Return the values. Only results that have rows and columns of this table are fetched.

        Raises:
            DataError: A column has different values in two tables of a union, or meta_info differs.
        """
        bare = [DataProto(meta_info=fetch(source).meta_info) for source in self.bare]
        tables = [DataProto.concat(bare)] if bare else []
        tables += [strip.take(names, fetch) for strip, names in self.strips().items()]
        return DataProto.union(*tables)

    def index(self, left: Callable[[], float | None]) -> Index:
        """Return the index of the table, computed from the indices of its sources.

        Args:
            left: A function that returns the remaining time to wait for these indices, in seconds.

        Raises:
            DataError: Two tables of a union have different samples, or a column with different row lengths.
        """

        @functools.cache
        def known(strip: Strip) -> tuple[Gather, list[Index]]:
            needed = strip.needed()
            return Gather(needed.sizes, needed.picks), [source.index(left()) for source in needed.sources]

        uids: list[np.ndarray] = []
        for strip in self.samples:
            plan, indices = known(strip)
            given = [index.uids for index in indices if index.uids is not None]
            uids += [plan.array(given)] if len(given) == len(indices) else []
        for other in uids[1:]:
            if not same(uids[0], other):
                raise DataError(
                    "the batches have different samples", field="uid", got=other[:4], expected=uids[0][:4]
                )
        lengths: dict[str, Tensor] = {}
        for strip, names in self.strips().items():
            plan, indices = known(strip)
            gathered: dict[tuple[int, ...], Tensor] = {}  # columns of equal lengths are gathered once
            for name in names:
                if name in indices[0].lengths:
                    parts = [index.lengths[name] for index in indices]
                    family = tuple(map(id, parts))
                    if family not in gathered:
                        gathered[family] = plan.dense(parts)
                    if not torch.equal(lengths.setdefault(name, gathered[family]), gathered[family]):
                        raise DataError("two batches have one column with different lengths", field=name)
        ordered = shared((name, lengths[name]) for name in self.columns if name in lengths)
        row_ids = torch.from_numpy(_array(self.row_ids))
        return Index(uids[0] if uids else None, row_ids, ordered, tuple(self.columns))


def compact(rows: RowIndex) -> slice | np.ndarray:
    """Return a row selection in a compact type, for sending.

    The result is a slice, a mask of one byte per row, or row numbers (of four bytes each if they fit).
    """
    if isinstance(rows, slice):
        return rows
    array = rows if isinstance(rows, np.ndarray) else torch.as_tensor(rows, device="cpu").numpy()
    if array.dtype == bool:
        return array
    fits = len(array) == 0 or (array.min() >= -(2**31) and array.max() < 2**31)
    return array.astype(np.int32 if fits else np.int64)


def _check_size(got: int, expected: int, what: str) -> None:
    if got != expected:
        raise DataError(
            f"{what} has a different number of rows than its division",
            got=f"{got} rows",
            expected=f"{expected} rows",
            remedy="a method registered with balance must return one row for each row that it gets",
        )


def _array(picks: Picks) -> np.ndarray:
    """Return the row numbers as (n) int64."""
    if isinstance(picks, range):
        return np.arange(picks.start, picks.stop)
    return picks.astype(np.int64, copy=False)


def _numbered(rows: np.ndarray) -> Picks:
    """Return the row numbers; as a range if the numbers are consecutive."""
    if (np.diff(rows) == 1).all():
        return range(int(rows[0]), int(rows[-1]) + 1) if len(rows) else range(0)
    return rows


def _composed(outer: Picks, inner: Picks) -> Picks:
    """Return the selection outer[inner]."""
    if isinstance(outer, range):
        if isinstance(inner, range):
            return range(outer.start + inner.start, outer.start + inner.stop)
        return inner + outer.start
    return outer[inner.start : inner.stop] if isinstance(inner, range) else outer[inner]


def _beside(known: Strips, others: Strips) -> Strips:
    """Return the strips of a column in both tables of a union, without duplicates."""
    return known + tuple(s for s in others if not any(s is k or s.same(k) for k in known))


def _joined(strips: Strips) -> Strip:
    """Return one strip with the concatenated rows of all strips; shared results appear only once."""
    sources: list[Source] = []
    sizes: list[int] = []
    starts: dict[tuple[Source, ...], int] = {}
    rows: list[np.ndarray] = []
    for strip in strips:
        if strip.sources not in starts:
            starts[strip.sources] = sum(sizes)
            sources += strip.sources
            sizes += strip.sizes
        rows.append(starts[strip.sources] + _array(strip.picks))
    return Strip(tuple(sources), tuple(sizes), _numbered(np.concatenate(rows)))
