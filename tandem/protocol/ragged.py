"""Ragged: a batch of sequences of unequal length as values and offsets. Nothing here pads unless
asked to, and nothing loops over the sequences in Python except the conversions from and to lists.

PyTorch's jagged nested tensors cannot be indexed, sliced, concatenated or repeated along the batch
(2.13), hence this type; `to_nested` and `from_nested` convert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.errors import DataError

RowIndex = slice | Sequence[int] | Tensor


class Ragged:
    """B sequences of lengths T_0 … T_{B-1}.

    Args:
        values: (sum of T_i, …), any dtype and device.
        offsets: (B+1) int64 from 0 to len(values), non-decreasing. Kept on the host, so that
            lengths are known without waiting for a device.

    Raises:
        DataError: offsets that do not describe `values`.
    """

    __slots__ = ("offsets", "values")

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        offsets = offsets.to(device="cpu", dtype=torch.int64)
        if offsets.ndim != 1 or len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(values):
            raise DataError(
                "offsets do not describe the values",
                got=f"offsets {offsets.tolist()[:4]}… for {len(values)} values",
                expected=f"a non-decreasing row from 0 to {len(values)}",
            )
        if bool((offsets.diff() < 0).any()):
            raise DataError("offsets decrease", got=offsets.tolist()[:8], expected="non-decreasing")
        self.values = values
        self.offsets = offsets

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor | Sequence[int]) -> Ragged:
        return cls(values, offsets_of(torch.as_tensor(lengths, dtype=torch.int64, device="cpu")))

    @classmethod
    def from_list(cls, rows: Sequence[Tensor | Sequence[Any]], dtype: torch.dtype | None = None) -> Ragged:
        """One row per sequence. An empty list of rows needs a dtype."""
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        values = torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype)
        return cls.from_lengths(values, [len(t) for t in tensors])

    @classmethod
    def from_padded(cls, padded: Tensor, mask: Tensor) -> Ragged:
        """The entries of `padded` (B, T, …) where `mask` (B, T) is true, row by row."""
        if padded.shape[:2] != mask.shape:
            raise DataError(
                "mask does not fit the rectangle", got=tuple(mask.shape), expected=tuple(padded.shape[:2])
            )
        mask = mask.bool()
        return cls.from_lengths(padded[mask], mask.sum(1))

    @classmethod
    def from_nested(cls, nested: Tensor) -> Ragged:
        return cls(nested.values(), nested.offsets())  # type: ignore[attr-defined]

    @classmethod
    def cat(cls, parts: Sequence[Ragged]) -> Ragged:
        """All rows of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        return cls.from_lengths(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))

    @property
    def lengths(self) -> Tensor:
        """(B) int64 on the host."""
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
        """One view per row."""
        return torch.split(self.values, self.lengths.tolist())

    def row(self, index: int) -> Tensor:
        """A view of one row."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def __getitem__(self, rows: RowIndex) -> Ragged:
        """The named rows in the given order; a boolean tensor filters. Contiguous slices are views."""
        if isinstance(rows, slice) and rows.step in (None, 1):
            start, stop, _ = rows.indices(len(self))
            stop = max(start, stop)
            low, high = int(self.offsets[start]), int(self.offsets[stop])
            return Ragged(self.values[low:high], self.offsets[start : stop + 1] - low)
        index = row_index(rows, len(self))
        lengths = self.lengths[index]
        picks = span_indices(self.offsets[:-1][index], lengths)
        return Ragged.from_lengths(self.values[picks.to(self.device)], lengths)

    def repeat_interleave(self, repeats: int) -> Ragged:
        """Each row `repeats` times in succession."""
        return self[torch.arange(len(self)).repeat_interleave(repeats)]

    def with_values(self, values: Tensor) -> Ragged:
        """Other values of the same lengths."""
        return Ragged(values, self.offsets)

    def to(self, device: torch.device | str | torch.dtype) -> Ragged:
        return Ragged(self.values.to(device), self.offsets)

    def row_ids(self) -> Tensor:
        """(total) int64: the row each value belongs to; on the values' device."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths).to(self.device)

    def positions(self) -> Tensor:
        """(total) int64: the place of each value in its row; on the values' device."""
        return span_indices(torch.zeros(len(self), dtype=torch.int64), self.lengths).to(self.device)

    def to_padded(self, padding: float = 0, length: int | None = None) -> Tensor:
        """(B, longest or `length`, …), padded on the right."""
        longest = int(self.lengths.max()) if len(self) else 0
        width = longest if length is None else length
        if width < longest:
            raise DataError("padded length below the longest row", got=width, expected=f">= {longest}")
        out = self.values.new_full((len(self), width, *self.values.shape[1:]), padding)
        out[self.row_ids(), self.positions()] = self.values
        return out

    def to_nested(self) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets.to(self.device))

    def equal(self, other: Ragged) -> bool:
        """Same dtype, lengths and values."""
        return (
            self.dtype == other.dtype
            and torch.equal(self.offsets, other.offsets)
            and torch.equal(self.values, other.values)
        )


def offsets_of(lengths: Tensor) -> Tensor:
    """(B) lengths to (B+1) offsets."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def span_indices(starts: Tensor, lengths: Tensor) -> Tensor:
    """start_0 … start_0+length_0-1, start_1 …: (sum of lengths) int64."""
    shift = starts - offsets_of(lengths)[:-1]
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(shift, lengths)


def row_index(rows: RowIndex, count: int) -> Tensor:
    """Any way of naming rows as (n) int64 indices on the host.

    Raises:
        IndexError: a row that is not there.
    """
    if isinstance(rows, slice):
        return torch.arange(count)[rows] if rows.step in (None, 1) else torch.tensor(range(count)[rows])
    index = torch.as_tensor(rows, device="cpu")
    if index.dtype == torch.bool:
        if len(index) != count:
            raise IndexError(f"a mask of {len(index)} for {count} rows")
        return index.nonzero().flatten()
    index = index.to(torch.int64)
    if len(index) and not (-count <= int(index.min()) and int(index.max()) < count):
        raise IndexError(f"rows {index.tolist()[:8]} of {count}")
    return torch.where(index < 0, index + count, index)
