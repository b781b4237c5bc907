"""Index: what the controller knows of a batch that lives with the workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.errors import DataError
from tandem.protocol import DataProto, Ragged
from tandem.protocol.ragged import RowIndex, row_index


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """The shape of a batch of B samples without its values; a few tens of bytes per sample.

    Attributes:
        uids: (B) object array, or None for a batch without that column. Survives `select`, so that
            samples stay recognisable.
        row_ids: (B) int64, the place of each row in the batch as its method returned it.
        lengths: ragged column to (B) int64 row lengths; columns of equal lengths share one tensor.
        columns: names of all columns.
    """

    uids: np.ndarray | None
    row_ids: Tensor
    lengths: Mapping[str, Tensor]
    columns: tuple[str, ...]

    @classmethod
    def of(cls, batch: DataProto) -> Index:
        """
        Raises:
            DataError: something else than a batch.
        """
        if not isinstance(batch, DataProto):
            raise DataError("only a batch has an index", got=type(batch).__name__, expected="DataProto")
        return cls(
            batch.non_tensor_batch.get("uid"),
            torch.arange(len(batch)),
            _shared((name, c.lengths) for name, c in batch.batch.items() if isinstance(c, Ragged)),
            batch.columns,
        )

    def __len__(self) -> int:
        return len(self.row_ids)

    def __getitem__(self, rows: RowIndex) -> Index:
        """The named rows in the given order; a boolean mask filters."""
        pick = row_index(rows, len(self))
        uids = None if self.uids is None else self.uids[pick.numpy()]
        picked = {id(lengths): lengths[pick] for lengths in self.lengths.values()}
        lengths = {name: picked[id(column)] for name, column in self.lengths.items()}
        return Index(uids, self.row_ids[pick], lengths, self.columns)

    def select(self, columns: Sequence[str]) -> Index:
        """Only the named columns.

        Raises:
            DataError: a name that is not there.
        """
        for name in columns:
            if name not in self.columns:
                raise DataError("no such column", field=name, expected=self.columns)
        lengths = {name: self.lengths[name] for name in columns if name in self.lengths}
        return Index(self.uids, self.row_ids, lengths, tuple(columns))

    def union(self, *others: Index) -> Index:
        """The columns of all side by side; uids and row ids of the first that has them.

        Raises:
            DataError: row counts, uids or the lengths of one column differ.
        """
        uids, columns, lengths = self.uids, dict.fromkeys(self.columns), dict(self.lengths)
        for other in others:
            if len(other) != len(self):
                raise DataError(
                    "batches of different size",
                    got=f"{len(other)} rows: {', '.join(other.columns)}",
                    expected=f"{len(self)} rows: {', '.join(self.columns)}",
                )
            if uids is not None and other.uids is not None and not np.array_equal(uids, other.uids):
                raise DataError(
                    "batches of different samples", field="uid", got=other.uids[:4], expected=uids[:4]
                )
            uids = other.uids if uids is None else uids
            columns.update(dict.fromkeys(other.columns))
            for name, column in other.lengths.items():
                if not torch.equal(lengths.setdefault(name, column), column):
                    raise DataError("one column with different lengths", field=name)
        return Index(uids, self.row_ids, _shared(lengths.items()), tuple(columns))

    @staticmethod
    def concat(parts: Sequence[Index]) -> Index:
        """The rows of all parts below each other; row ids count through.

        Raises:
            DataError: parts with different columns.
        """
        first = parts[0]
        for part in parts:
            if set(part.columns) != set(first.columns):
                raise DataError("batches have different columns", got=part.columns, expected=first.columns)
        uids = [part.uids for part in parts if part.uids is not None]
        lengths = {name: torch.cat([part.lengths[name] for part in parts]) for name in first.lengths}
        return Index(
            np.concatenate(uids) if len(uids) == len(parts) else None,
            torch.arange(sum(map(len, parts))),
            _shared(lengths.items()),
            first.columns,
        )


def _shared(lengths: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The same mapping with one tensor object for all columns of equal lengths, so that an index
    holds and sends each only once."""
    families: list[Tensor] = []
    out: dict[str, Tensor] = {}
    for name, column in lengths:
        family = next((known for known in families if torch.equal(known, column)), None)
        if family is None:
            families.append(column)
            family = column
        out[name] = family
    return out
