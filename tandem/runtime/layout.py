"""Layout: in which results the rows of each column of a table lie, and at which places. Everything but the
last step of evaluating an expression is arithmetic on layouts, and needs no value."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from tandem.protocol import DataProto
from tandem.protocol.equality import same
from tandem.protocol.gather import Picks
from tandem.protocol.ragged import RowIndex, picks
from tandem.runtime.handle import Source
from tandem.runtime.table import Table


@dataclass(frozen=True, slots=True, eq=False)
class Strip:
    """Rows of some results put below each other; columns side by side share one.

    Attributes:
        sources: the results, at least one.
        sizes: rows of each.
        picks: the wanted rows of all of them.
    """

    sources: tuple[Source, ...]
    sizes: tuple[int, ...]
    picks: Picks

    def __getitem__(self, rows: Picks) -> Strip:
        return Strip(self.sources, self.sizes, _composed(self.picks, rows))

    def same(self, other: Strip) -> bool:
        """Tells whether both are the same rows of the same results."""
        return self.sources == other.sources and same(self.picks, other.picks)

    def needed(self) -> Strip:
        """Leaves out the results that hold none of the rows; of no rows, all but the smallest result."""
        sizes = np.asarray(self.sizes)
        ends = np.cumsum(sizes)
        if len(self.picks) == 0:
            return self._only([int(sizes.argmin())], range(0))
        if isinstance(self.picks, range):
            first = int(np.searchsorted(ends, self.picks.start, side="right"))
            last = int(np.searchsorted(ends, self.picks.stop - 1, side="right"))
            shift = int(ends[first] - sizes[first])
            moved = range(self.picks.start - shift, self.picks.stop - shift)
            return self._only(list(range(first, last + 1)), moved)
        holder = np.searchsorted(ends, self.picks, side="right")
        used, place = np.unique(holder, return_inverse=True)
        shifts = (ends - sizes)[used] - (np.cumsum(sizes[used]) - sizes[used])
        rows = self.picks - shifts[place]
        successive = bool((np.diff(rows) == 1).all())
        return self._only(used.tolist(), range(int(rows[0]), int(rows[-1]) + 1) if successive else rows)

    def _only(self, used: Sequence[int], rows: Picks) -> Strip:
        return Strip(tuple(self.sources[i] for i in used), tuple(self.sizes[i] for i in used), rows)

    def take(self, names: Sequence[str], fetch: Callable[[Source], DataProto]) -> DataProto:
        """The values of the named columns, on memory of their own where a source's is borrowed."""
        strip = self.needed()
        tables = []
        for source in strip.sources:
            table = fetch(source)
            arrays = [name for name in names if name in table.non_tensor_batch]
            tables.append(table.select([name for name in names if name not in arrays], arrays))
        taken = DataProto.gather(tables, strip.picks)
        view = len(strip.sources) == 1 and isinstance(strip.picks, range)
        return taken.clone() if view and strip.sources[0].handle.borrowed else taken


@dataclass(frozen=True, slots=True, eq=False)
class Layout(Table):
    """The layout of a table of B rows.

    Attributes:
        rows: B.
        columns: where each column lies; where a column came from several sides of a union, all of them,
            which must agree.
        bare: results without columns, for their meta_info.
    """

    rows: int
    columns: dict[str, tuple[Strip, ...]]
    bare: tuple[Source, ...] = ()

    @classmethod
    def of(cls, source: Source, timeout_s: float | None) -> Layout:
        """All rows of a result."""
        rows, columns = source.shape or (len(source.index(timeout_s)), source.index(timeout_s).columns)
        strip = Strip((source,), (rows,), range(rows))
        return cls(rows, {name: (strip,) for name in columns}, () if columns else (source,))

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, rows: RowIndex) -> Self:
        wanted = picks(rows, self.rows)
        taken: dict[Strip, Strip] = {}
        for strips in self.columns.values():
            for strip in strips:
                if strip not in taken:
                    taken[strip] = strip[wanted]
        columns = {name: tuple(taken[s] for s in strips) for name, strips in self.columns.items()}
        return replace(self, rows=len(wanted), columns=columns)

    def _only(self, columns: Sequence[str]) -> Self:
        return replace(self, columns={name: self.columns[name] for name in columns})

    def _beside(self, others: Sequence[Self]) -> Self:
        columns = dict(self.columns)
        for other in others:
            for name, strips in other.columns.items():
                known = columns.get(name, ())
                new = tuple(s for s in strips if not any(s is k or s.same(k) for k in known))
                columns[name] = known + new
        bare = [source for table in (self, *others) for source in table.bare]
        return replace(self, columns=columns, bare=tuple(bare))

    def _below(self, others: Sequence[Self]) -> Self:
        if not others:
            return self
        parts = (self, *others)
        joined: dict[tuple[Strip, ...], Strip] = {}
        columns: dict[str, tuple[Strip, ...]] = {}
        for name in self.columns:
            sides = [part.columns[name] for part in parts]
            columns[name] = ()
            for i in range(max(map(len, sides))):
                stack = tuple(side[min(i, len(side) - 1)] for side in sides)
                if stack not in joined:
                    joined[stack] = _below(stack)
                columns[name] += (joined[stack],)
        bare = dict.fromkeys(source for part in parts for source in part.bare)
        return replace(self, rows=sum(map(len, parts)), columns=columns, bare=tuple(bare))

    def strips(self) -> dict[Strip, list[str]]:
        """The columns of each strip; those that provide a column before those that must agree with it."""
        out: dict[Strip, list[str]] = {}
        for rank in range(max(map(len, self.columns.values()), default=0)):
            for name, strips in self.columns.items():
                if rank < len(strips):
                    out.setdefault(strips[rank], []).append(name)
        return out

    def take(self, fetch: Callable[[Source], DataProto]) -> DataProto:
        """The values; only results that hold wanted rows of wanted columns are fetched.

        Raises:
            DataError: one column with different values on two sides of a union, or meta_info that differs.
        """
        bare = [DataProto(meta_info=fetch(source).meta_info) for source in self.bare]
        tables = [DataProto.concat(bare)] if bare else []
        tables += [strip.take(names, fetch) for strip, names in self.strips().items()]
        return tables[0].union(*tables[1:])


def compact(rows: RowIndex) -> slice | np.ndarray:
    """Rows as they travel: a slice, a mask of one byte each, or integers of four bytes where they fit."""
    if isinstance(rows, slice):
        return rows
    array = rows if isinstance(rows, np.ndarray) else torch.as_tensor(rows, device="cpu").numpy()
    if array.dtype == bool:
        return array
    fits = len(array) == 0 or (array.min() >= -(2**31) and array.max() < 2**31)
    return array.astype(np.int32 if fits else np.int64)


def _composed(outer: Picks, inner: Picks) -> Picks:
    """outer[inner]."""
    if isinstance(outer, range):
        if isinstance(inner, range):
            return range(outer.start + inner.start, outer.start + inner.stop)
        return inner + outer.start
    return outer[inner.start : inner.stop] if isinstance(inner, range) else outer[inner]


def _below(strips: Sequence[Strip]) -> Strip:
    """The rows of all strips below each other; results that several of them name stand there once."""
    sources: list[Source] = []
    sizes: list[int] = []
    starts: dict[tuple[Source, ...], int] = {}
    rows: list[Picks] = []
    for strip in strips:
        if strip.sources not in starts:
            starts[strip.sources] = sum(sizes)
            sources += strip.sources
            sizes += strip.sizes
        start = starts[strip.sources]
        rows.append(_composed(range(start, start + sum(strip.sizes)), strip.picks))
    successive = all(
        isinstance(a, range) and isinstance(b, range) and a.stop == b.start
        for a, b in itertools.pairwise(rows)
    )
    first, last = rows[0], rows[-1]
    if successive and isinstance(first, range) and isinstance(last, range):
        return Strip(tuple(sources), tuple(sizes), range(first.start, last.stop))
    return Strip(tuple(sources), tuple(sizes), np.concatenate([np.asarray(r, dtype=np.int64) for r in rows]))
