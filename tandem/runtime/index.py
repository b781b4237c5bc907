"""The index of a batch: the columns and row lengths that the controller knows without the values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tandem.errors import DataError
from tandem.protocol import DataProto, Ragged
from tandem.protocol.data import object_array
from tandem.protocol.ragged import RowIndex, row_index


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """The index of a batch of B samples: ids, row lengths and column names, without the values.

    An index needs a few tens of bytes per sample.

    Attributes:
        uids: (B) object array, or None if the batch has no uids. `select` keeps the uids, so that samples can
            still be identified.
        row_ids: (B) int64, the row number of each row in the batch that the worker's method returned.
        lengths: For each ragged column: (B) int64 row lengths. Columns of equal lengths share one tensor.
        columns: The names of all columns.
    """

    uids: np.ndarray | None
    row_ids: Tensor
    lengths: Mapping[str, Tensor]
    columns: tuple[str, ...]

    @classmethod
    def of(cls, batch: DataProto) -> Index:
        """Return the index of a batch that is in this process.

        Raises:
            DataError: The value is not a batch.
        """
        require_batch(batch, "only a batch has an index")
        lengths = shared((name, c.lengths) for name, c in batch.batch.items() if isinstance(c, Ragged))
        return cls(batch.non_tensor_batch.get("uid"), torch.arange(len(batch)), lengths, batch.columns)

    def __len__(self) -> int:
        return len(self.row_ids)

    def __getitem__(self, rows: RowIndex) -> Self:
        """Return the index of the rows with the given numbers, in this order; a boolean mask filters rows."""
        pick = row_index(rows, len(self))
        uids = None if self.uids is None else self.uids[pick.numpy()]
        picked = {id(lengths): lengths[pick] for lengths in self.lengths.values()}
        lengths = {name: picked[id(column)] for name, column in self.lengths.items()}
        return replace(self, uids=uids, row_ids=self.row_ids[pick], lengths=lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the index in few bytes.

        Each distinct tensor of lengths is pickled once, integers use the smallest type, and the row numbers 0
        … B-1 are pickled as their count.
        """
        families = list({id(column): column for column in self.lengths.values()}.values())
        place = {id(column): number for number, column in enumerate(families)}
        counted = torch.equal(self.row_ids, torch.arange(len(self)))
        return _unpacked, (
            None if self.uids is None else self.uids.tolist(),
            len(self) if counted else _packed(self.row_ids),
            [_packed(column) for column in families],
            [(name, place[id(column)]) for name, column in self.lengths.items()],
            self.columns,
        )


def require_batch(value: Any, message: str) -> DataProto:
    """Return the value if it is a batch.

    Raises:
        DataError: The value is not a batch. `message` says why a batch is needed.
    """
    if isinstance(value, DataProto):
        return value
    raise DataError(
        message,
        got=type(value).__name__,
        expected="DataProto",
        remedy='register the method with collect="first" or another dispatch mode',
    )


def _packed(numbers: Tensor) -> np.ndarray:
    """Convert integers to the smallest integer type that fits the largest value."""
    largest = int(numbers.max()) if len(numbers) else 0
    return numbers.numpy().astype(np.min_scalar_type(largest))


def _integers(packed: np.ndarray) -> Tensor:
    return torch.from_numpy(packed.astype(np.int64))


def _unpacked(
    uids: list[Any] | None,
    row_ids: int | np.ndarray,
    families: list[np.ndarray],
    lengths: list[tuple[str, int]],
    columns: tuple[str, ...],
) -> Index:
    tensors = list(map(_integers, families))
    rows = torch.arange(row_ids) if isinstance(row_ids, int) else _integers(row_ids)
    places = {name: tensors[place] for name, place in lengths}
    return Index(None if uids is None else object_array(uids), rows, places, columns)


def shared(lengths: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Use one tensor object for all columns with equal lengths, so that an index stores and sends it once."""
    families: list[Tensor] = []
    out: dict[str, Tensor] = {}
    for name, column in lengths:
        family = next((known for known in families if known is column or torch.equal(known, column)), None)
        if family is None:
            families.append(column)
            family = column
        out[name] = family
    return out
