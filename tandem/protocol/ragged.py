"""Ragged: a batch of sequences of different lengths, stored as values and offsets.

Sequences are padded only by `to_padded`. No function loops over sequences in Python, except the conversions
from and to lists.

PyTorch's jagged nested tensors (2.13) cannot be indexed, sliced, concatenated or repeated along the batch, so
Tandem has a separate type. `to_nested` and `from_nested` convert between the two types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.errors import DataError
from tandem.protocol.gather import Gather, Picks, offsets_of
from tandem.protocol.gather import span_indices as span_indices
from tandem.protocol.shipping import Shipped, unwrap

RowIndex = slice | Sequence[int] | np.ndarray | Tensor


class Ragged:
    """A batch of B sequences with lengths T_0 … T_{B-1}.

    Args:
        values: (sum of T_i, …), any dtype and device.
        offsets: (B+1) int64, non-decreasing, from 0 to len(values). Offsets are always on the CPU, so that
            reading lengths needs no device synchronisation.

    Raises:
        DataError: the offsets do not match the values.
    """

    __slots__ = ("offsets", "values")

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        offsets = offsets.to(device="cpu", dtype=torch.int64)
        on_host = offsets.numpy()
        if offsets.ndim != 1 or len(on_host) < 1 or on_host[0] != 0 or on_host[-1] != len(values):
            raise DataError(
                "offsets do not match the values",
                got=f"offsets {offsets.tolist()[:4]}… for {len(values)} values",
                expected=f"one dimension, from 0 to {len(values)}, non-decreasing",
            )
        if (on_host[1:] < on_host[:-1]).any():
            raise DataError("offsets decrease", got=offsets.tolist()[:8], expected="non-decreasing")
        self.values = values
        self.offsets = offsets

    @classmethod
    def trusted(cls, values: Tensor, offsets: Tensor) -> Ragged:
        """Build a Ragged without checks; the offsets must be int64, on the CPU, and match the values."""
        ragged = cls.__new__(cls)
        ragged.values = values
        ragged.offsets = offsets
        return ragged

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor | Sequence[int]) -> Ragged:
        return cls(values, offsets_of(torch.as_tensor(lengths, dtype=torch.int64, device="cpu")))

    @classmethod
    def from_list(cls, rows: Sequence[Tensor | Sequence[Any]], dtype: torch.dtype | None = None) -> Ragged:
        """Build a Ragged with one row per sequence; an empty list of rows needs a dtype."""
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        values = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype)
        return cls.from_lengths(values, [len(t) for t in tensors])

    @classmethod
    def from_padded(cls, padded: Tensor, mask: Tensor) -> Ragged:
        """Take the entries of `padded` (B, T, …) at which `mask` (B, T) is true, row by row."""
        if padded.shape[:2] != mask.shape:
            raise DataError(
                "the mask has the wrong shape", got=tuple(mask.shape), expected=tuple(padded.shape[:2])
            )
        mask = mask.bool()
        return cls.from_lengths(padded[mask], mask.sum(1))

    @classmethod
    def from_nested(cls, nested: Tensor) -> Ragged:
        return cls(nested.values(), nested.offsets())  # type: ignore[attr-defined]

    @classmethod
    def cat(cls, parts: Sequence[Ragged]) -> Ragged:
        """Concatenate the rows of all parts, in order."""
        sizes = [len(part) for part in parts]
        return cls.gather(parts, Gather(sizes, range(sum(sizes))))

    @classmethod
    def gather(cls, parts: Sequence[Ragged], plan: Gather) -> Ragged:
        """Return the rows of the parts that the plan selects."""
        return cls.trusted(*plan.ragged([part.values for part in parts], [part.offsets for part in parts]))

    @property
    def lengths(self) -> Tensor:
        """(B) int64, on the CPU."""
        return self.offsets.diff()

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {len(self.values)} values, {self.dtype}, {self.device})"

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind())

    def unbind(self) -> tuple[Tensor, ...]:
        """Return one view per row."""
        return torch.split(self.values, self.lengths.tolist())

    def row(self, index: int) -> Tensor:
        """Return a view of one row."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} is out of range for {len(self)} rows")
        index %= len(self)
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def __getitem__(self, rows: RowIndex) -> Ragged:
        """Return the given rows in the given order.

        A boolean tensor filters the rows. Contiguous slices are views.
        """
        return Ragged.gather([self], Gather([len(self)], picks(rows, len(self))))

    def repeat_interleave(self, repeats: int) -> Ragged:
        """Repeat each row `repeats` times; the copies of a row follow each other."""
        return self[torch.arange(len(self)).repeat_interleave(repeats)]

    def with_values(self, values: Tensor) -> Ragged:
        """Return a Ragged with new values and the same lengths."""
        return Ragged(values, self.offsets)

    def to(self, device: torch.device | str | torch.dtype) -> Ragged:
        return Ragged(self.values.to(device), self.offsets)

    def row_ids(self) -> Tensor:
        """Return the row number of each value, (total) int64, on the device of the values."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths).to(self.device)

    def positions(self) -> Tensor:
        """Return the position of each value in its row, (total) int64, on the device of the values."""
        return span_indices(torch.zeros(len(self), dtype=torch.int64), self.lengths).to(self.device)

    def to_padded(self, padding: float = 0, length: int | None = None) -> Tensor:
        """Return the rows padded on the right, (B, longest row or `length`, …)."""
        longest = int(self.lengths.max()) if len(self) else 0
        width = longest if length is None else length
        if width < longest:
            raise DataError("padded length is below the longest row", got=width, expected=f">= {longest}")
        out = self.values.new_full((len(self), width, *self.values.shape[1:]), padding)
        out[self.row_ids(), self.positions()] = self.values
        return out

    def to_nested(self) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets.to(self.device))

    def equal(self, other: Ragged) -> bool:
        """Return whether dtype, lengths and values are equal."""
        return (
            self.dtype == other.dtype
            and same_tensor(self.offsets, other.offsets)
            and same_tensor(self.values, other.values)
        )

    def __getstate__(self) -> tuple[Shipped, Shipped]:
        return Shipped(self.values), Shipped(self.offsets)

    def __setstate__(self, state: tuple[Any, Any]) -> None:
        self.values, self.offsets = map(unwrap, state)


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, where NaN equals NaN.

    Tensors that share the same memory are equal and are not read.
    """
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    same_place = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    if same_place or torch.equal(a, b):
        return True
    return a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())


def cut_offsets(offsets: Tensor, spans: Sequence[slice]) -> tuple[list[int], list[Tensor]]:
    """Return the number of values and the new offsets of each slice in a series of consecutive row slices."""
    on_host = offsets.numpy()
    parts = [on_host[span.start : span.stop + 1] for span in spans]
    return [int(part[-1] - part[0]) for part in parts], [torch.from_numpy(part - part[0]) for part in parts]


def row_index(rows: RowIndex, count: int) -> Tensor:
    """Convert a row selection of any type to indices, (n) int64 on the CPU.

    Raises:
        IndexError: a row is out of range.
    """
    if isinstance(rows, slice):
        return torch.tensor(range(count)[rows], dtype=torch.int64)
    # PyTorch does not accept NumPy arrays with negative strides, so copy the array
    index = torch.as_tensor(rows.copy() if isinstance(rows, np.ndarray) else rows, device="cpu")
    if index.dtype == torch.bool:
        if len(index) != count:
            raise IndexError(f"a mask of {len(index)} entries does not match {count} rows")
        return index.nonzero().flatten()
    index = index.to(torch.int64)
    if len(index) and not (-count <= int(index.min()) and int(index.max()) < count):
        raise IndexError(f"rows {index.tolist()[:8]} are out of range for {count} rows")
    return torch.where(index < 0, index + count, index)


def picks(rows: RowIndex, count: int) -> Picks:
    """Convert a row selection to row numbers, like `row_index`; consecutive rows become a range."""
    if isinstance(rows, slice) and rows.step in (None, 1):
        return range(count)[rows]
    return row_index(rows, count).numpy()
