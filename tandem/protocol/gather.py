"""Rows of several tables put below each other and picked: one plan for all columns, one copy of each.

A plan holds the picked rows as runs, which are successive rows of one table. One run is a view of its
table; several are copied once, each to its place. Rows that are short and scattered are indexed instead,
where a slice for each run would cost more than the copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

RUN_VALUES = 256  # the mean length from which copying run by run is faster than indexing

_MANY = 64  # slices from which NumPy joins them faster: each costs it a hundredth of PyTorch's
_BITS = {
    torch.bool: torch.uint8,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
}
"""Types whose bits travel as those of an integer type that NumPy has."""

Picks = range | np.ndarray
"""Rows by number: successive ones as a range of step 1, any others as (n) integers."""


class Gather:
    """The plan of `concat(tables)[picks]`.

    Args:
        sizes: rows of each table; at least one table.
        picks: rows of all tables put below each other, in the wanted order.
    """

    def __init__(self, sizes: Sequence[int], picks: Picks) -> None:
        self.picks = picks = picks if isinstance(picks, range) else np.array(picks, dtype=np.int64)
        ends = np.cumsum(sizes)
        starts = ends - sizes
        self.everything = isinstance(picks, range) and len(picks) == ends[-1]
        if isinstance(picks, range):
            first = np.maximum(starts, picks.start)
            last = np.minimum(ends, picks.stop)
            self._table = np.flatnonzero(first < last)
            self._start = (first - starts)[self._table]
            self._stop = (last - starts)[self._table]
        else:
            table = np.searchsorted(ends, picks, side="right")
            row = picks - starts[table]
            breaks = np.flatnonzero((np.diff(table) != 0) | (np.diff(row) != 1)) + 1
            heads = np.concatenate([np.zeros(min(len(picks), 1), np.int64), breaks])
            tails = np.concatenate([breaks, np.full(min(len(picks), 1), len(picks))]) - 1
            self._table, self._start, self._stop = table[heads], row[heads], row[tails] + 1
        self._families: dict[tuple[int, ...], tuple[Tensor, np.ndarray, np.ndarray]] = {}

    @property
    def is_view(self) -> bool:
        """Tells whether all columns of the result are views of the tables'."""
        return len(self._table) <= 1

    def dense(self, columns: Sequence[Tensor]) -> Tensor:
        """(picked, …) of one column's tensors, one per table."""
        if self.is_view or self.everything:
            return _below(columns, self._table, self._start, self._stop)
        row_values = math.prod(columns[0].shape[1:])
        if len(columns) > 1 and row_values * len(self.picks) >= RUN_VALUES * len(self._table):
            return _below(columns, self._table, self._start, self._stop)
        whole = _whole(columns)
        return whole.index_select(0, self._index().to(whole.device))

    def ragged(self, values: Sequence[Tensor], offsets: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Values and offsets of a ragged column's picked rows. Columns of the same offset tensors get
        the same offset tensor again."""
        picked, low, high = self._family(offsets)
        if self.is_view or self.everything or int((high - low).sum()) >= RUN_VALUES * len(low):
            return _below(values, self._table, low, high), picked
        bases = np.cumsum([0, *(len(part) for part in values)])[self._table]
        lengths = torch.from_numpy(high - low)
        index = span_indices(torch.from_numpy(low + bases), lengths)
        whole = _whole(values)
        return whole[index.to(whole.device)], picked

    def array(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """(picked) of one column's object arrays."""
        if self.is_view:
            table, start, stop = self._only()
            return columns[table][start:stop]
        return _rows(columns[0] if len(columns) == 1 else np.concatenate(columns), self.picks)

    def _family(self, offsets: Sequence[Tensor]) -> tuple[Tensor, np.ndarray, np.ndarray]:
        """New offsets, and where each run's values begin and end in its table."""
        key = tuple(map(id, offsets))
        if key not in self._families:
            if len(self._table) == 1:
                table, start, stop = self._only()
                old = offsets[table]
                picked = old if len(old) == stop - start + 1 else old[start : stop + 1] - old[start]
                low, high = int(old[start]), int(old[stop])
                self._families[key] = picked, np.array([low]), np.array([high])
            else:
                bases = np.cumsum([0, *(len(part) for part in offsets)])[self._table]
                flat = np.concatenate([part.numpy() for part in offsets])
                lengths = _rows(np.concatenate([part.diff().numpy() for part in offsets]), self.picks)
                picked = offsets_of(torch.from_numpy(lengths))
                self._families[key] = picked, flat[bases + self._start], flat[bases + self._stop]
        return self._families[key]

    def _only(self) -> tuple[int, int, int]:
        """Table, first row and row behind the last of the only run; of none, an empty one."""
        if len(self._table) == 0:
            return 0, 0, 0
        return int(self._table[0]), int(self._start[0]), int(self._stop[0])

    def _index(self) -> Tensor:
        rows = self.picks
        return torch.arange(rows.start, rows.stop) if isinstance(rows, range) else torch.from_numpy(rows)


def _rows(column: np.ndarray, picks: Picks) -> np.ndarray:
    """The picked rows: a view of successive ones."""
    return column[picks.start : picks.stop] if isinstance(picks, range) else column[picks]


def _below(columns: Sequence[Tensor], tables: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Tensor:
    """Slices below each other: a view where there is one, else one copy."""
    runs = list(zip(tables.tolist(), starts.tolist(), stops.tolist(), strict=True))
    if not runs:
        return columns[0][:0]
    dtypes = {column.dtype for column in columns}
    on_host = all(column.device.type == "cpu" and not column.requires_grad for column in columns)
    if len(runs) >= _MANY and on_host and len(dtypes) == 1 and dtypes <= _BITS.keys():
        (dtype,) = dtypes
        bits = [column.view(_BITS[dtype]).numpy() for column in columns]
        joined = np.concatenate([bits[table][start:stop] for table, start, stop in runs])
        return torch.from_numpy(joined).view(dtype)
    slices = [columns[table][start:stop] for table, start, stop in runs]
    return slices[0] if len(slices) == 1 else torch.cat(_full(slices))


def _whole(columns: Sequence[Tensor]) -> Tensor:
    """All below each other."""
    full = _full(columns)
    return full[0] if len(full) == 1 else torch.cat(full)


def _full(columns: Sequence[Tensor]) -> list[Tensor]:
    """Leaves out the columns without values: they may be of another type, and have no say."""
    return [column for column in columns if len(column)] or list(columns[:1])


def offsets_of(lengths: Tensor) -> Tensor:
    """(B) lengths to (B+1) offsets."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def span_indices(starts: Tensor, lengths: Tensor) -> Tensor:
    """start_0 … start_0+length_0-1, start_1 …: (sum of lengths) int64."""
    shift = starts - offsets_of(lengths)[:-1]
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(shift, lengths)
