"""Concatenate tables and select rows, with one plan for all columns.

A plan stores the selected rows as runs. A run is a range of consecutive rows of one table. If there is a
single run, the result is a view. Several runs are copied once, each to its final position. If rows are short
and scattered, an index is used instead, because slicing per run would cost more than the copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

RUN_VALUES = 256  # from this mean number of values per run, copying runs is faster than indexing

_MANY_SLICES = 64  # from here NumPy concatenates faster: a slice costs 1/100 of what PyTorch needs
_BITS = {
    torch.bool: torch.uint8,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
}
"""A dict from a dtype that NumPy may lack to an integer dtype of the same size, for concatenation."""

Picks = range | np.ndarray
"""Row numbers: consecutive rows as a range with step 1, other rows as an integer array (n)."""


class Gather:
    """A plan to compute `concat(tables)[picks]`.

    Args:
        sizes: number of rows of each table; at least one table.
        picks: row numbers in the concatenated tables, in the order of the result.
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
        self._ragged_plans: dict[tuple[int, ...], tuple[Tensor, np.ndarray, np.ndarray]] = {}

    @property
    def is_view(self) -> bool:
        """Whether all columns of the result are views of the columns of a table."""
        return len(self._table) <= 1

    def dense(self, columns: Sequence[Tensor]) -> Tensor:
        """Return the selected rows of a dense column (picked, …), given one tensor per table."""
        if self.is_view or self.everything:
            return _concat_slices(columns, self._table, self._start, self._stop)
        row_values = math.prod(columns[0].shape[1:])
        if len(columns) > 1 and row_values * len(self.picks) >= RUN_VALUES * len(self._table):
            return _concat_slices(columns, self._table, self._start, self._stop)
        whole = _concat(columns)
        return whole.index_select(0, self._index().to(whole.device))

    def ragged(self, values: Sequence[Tensor], offsets: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the values and offsets of the selected rows of a ragged column.

        If columns share their offsets tensors, their results share one offsets tensor too.
        """
        picked, low, high = self._ragged_plan(offsets)
        if self.is_view or self.everything or int((high - low).sum()) >= RUN_VALUES * len(low):
            return _concat_slices(values, self._table, low, high), picked
        bases = np.cumsum([0, *(len(part) for part in values)])[self._table]
        lengths = torch.from_numpy(high - low)
        index = span_indices(torch.from_numpy(low + bases), lengths)
        whole = _concat(values)
        return whole[index.to(whole.device)], picked

    def array(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """Return the selected rows of an object column (picked), given one array per table."""
        if self.is_view:
            table, start, stop = self._single_run()
            return columns[table][start:stop]
        return _rows(columns[0] if len(columns) == 1 else np.concatenate(columns), self.picks)

    def _ragged_plan(self, offsets: Sequence[Tensor]) -> tuple[Tensor, np.ndarray, np.ndarray]:
        """Return the new offsets, and the start and stop of each run's values in its table."""
        key = tuple(map(id, offsets))
        if key not in self._ragged_plans:
            if len(self._table) == 1:
                table, start, stop = self._single_run()
                old = offsets[table]
                picked = old if len(old) == stop - start + 1 else old[start : stop + 1] - old[start]
                low, high = int(old[start]), int(old[stop])
                self._ragged_plans[key] = picked, np.array([low]), np.array([high])
            else:
                bases = np.cumsum([0, *(len(part) for part in offsets)])[self._table]
                flat = np.concatenate([part.numpy() for part in offsets])
                lengths = _rows(np.concatenate([part.diff().numpy() for part in offsets]), self.picks)
                picked = offsets_of(torch.from_numpy(lengths))
                self._ragged_plans[key] = picked, flat[bases + self._start], flat[bases + self._stop]
        return self._ragged_plans[key]

    def _single_run(self) -> tuple[int, int, int]:
        """Return table, first row and stop row of the only run; an empty run if no row is selected."""
        if len(self._table) == 0:
            return 0, 0, 0
        return int(self._table[0]), int(self._start[0]), int(self._stop[0])

    def _index(self) -> Tensor:
        rows = self.picks
        return torch.arange(rows.start, rows.stop) if isinstance(rows, range) else torch.from_numpy(rows)


def _rows(column: np.ndarray, picks: Picks) -> np.ndarray:
    """Return the selected rows; consecutive rows are a view."""
    return column[picks.start : picks.stop] if isinstance(picks, range) else column[picks]


def _concat_slices(
    columns: Sequence[Tensor], tables: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> Tensor:
    """Concatenate slices of the columns. A single slice is a view; several slices are copied once."""
    runs = list(zip(tables.tolist(), starts.tolist(), stops.tolist(), strict=True))
    if not runs:
        return columns[0][:0]
    dtypes = {column.dtype for column in columns}
    on_host = all(column.device.type == "cpu" and not column.requires_grad for column in columns)
    if len(runs) >= _MANY_SLICES and on_host and len(dtypes) == 1 and dtypes <= _BITS.keys():
        (dtype,) = dtypes
        bits = [column.view(_BITS[dtype]).numpy() for column in columns]
        joined = np.concatenate([bits[table][start:stop] for table, start, stop in runs])
        return torch.from_numpy(joined).view(dtype)
    slices = [columns[table][start:stop] for table, start, stop in runs]
    return slices[0] if len(slices) == 1 else torch.cat(_without_empty(slices))


def _concat(columns: Sequence[Tensor]) -> Tensor:
    """Concatenate whole columns."""
    full = _without_empty(columns)
    return full[0] if len(full) == 1 else torch.cat(full)


def _without_empty(columns: Sequence[Tensor]) -> list[Tensor]:
    """Drop columns without values, because their dtype may differ and must not affect the result."""
    return [column for column in columns if len(column)] or list(columns[:1])


def offsets_of(lengths: Tensor) -> Tensor:
    """Convert lengths (B) to offsets (B+1)."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def span_indices(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return start_0 … start_0+length_0-1, start_1 …, as int64 (sum of lengths)."""
    shift = starts - offsets_of(lengths)[:-1]
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(shift, lengths)
