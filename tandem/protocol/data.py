"""DataProto: a table of samples, the argument and result of workers' methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from tandem.balance import even
from tandem.errors import DataError
from tandem.protocol.gather import Gather, Picks
from tandem.protocol.merging import merge, merged_meta_info
from tandem.protocol.ragged import Ragged, RowIndex, cut_offsets, picks, row_index
from tandem.protocol.shipping import Shipped, unwrap
from tandem.unpickling import load_plain

Column = Tensor | Ragged
Kind = TypeVar("Kind", Tensor, Ragged)


class DataProto:
    """A table of B samples (rows) with named columns.

    Operations return new tables, which share memory with the old table where possible. Only `pop` changes its
    table.

    Args:
        batch: a dict from column name to a tensor (B, …) or a Ragged with B rows.
        non_tensor_batch: a dict from column name to an object array (B); lists are converted.
        meta_info: a dict of small values that describe the whole table.

    Raises:
        DataError: two columns have different numbers of rows. The message names both columns.
    """

    __slots__ = ("batch", "meta_info", "non_tensor_batch")

    def __init__(
        self,
        batch: Mapping[str, Column] | None = None,
        non_tensor_batch: Mapping[str, np.ndarray | Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        self.batch: dict[str, Column] = dict(batch or {})
        self.non_tensor_batch: dict[str, np.ndarray] = {
            name: object_array(column) for name, column in (non_tensor_batch or {}).items()
        }
        self.meta_info: dict[str, Any] = dict(meta_info or {})
        first: tuple[str, int] | None = None
        for name, column in (*self.batch.items(), *self.non_tensor_batch.items()):
            first = first or (name, len(column))
            if len(column) != first[1]:
                raise DataError(
                    "columns have different numbers of rows",
                    field=name,
                    got=f"{len(column)} rows",
                    expected=f"{first[1]} rows, as in '{first[0]}'",
                )

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Column] | None = None,
        non_tensors: Mapping[str, np.ndarray | Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """Build a table; this is the constructor with verl's parameter names."""
        return cls(tensors, non_tensors, meta_info)

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, Column | np.ndarray | Sequence[Any]],
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """Build a table from one dict with tensor and non-tensor columns.

        Tensors and Ragged columns go to `batch`, all other columns to `non_tensor_batch`.
        """
        tensors = {name: column for name, column in data.items() if isinstance(column, (Tensor, Ragged))}
        others = {n: column for n, column in data.items() if not isinstance(column, (Tensor, Ragged))}
        return cls(tensors, others, meta_info)

    def __len__(self) -> int:
        for column in (*self.batch.values(), *self.non_tensor_batch.values()):
            return len(column)
        return 0

    def __repr__(self) -> str:
        names = ", ".join((*self.batch, *self.non_tensor_batch))
        return f"DataProto({len(self)} samples: {names})"

    def __contains__(self, name: str) -> bool:
        return name in self.batch or name in self.non_tensor_batch

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.batch, *self.non_tensor_batch)

    def ragged(self, name: str) -> Ragged:
        """Return the ragged column with the given name.

        Raises:
            DataError: the column does not exist or is dense.
        """
        return self._column(name, Ragged, "ragged")

    def dense(self, name: str) -> Tensor:
        """Return the dense column with the given name.

        Raises:
            DataError: the column does not exist or is ragged.
        """
        return self._column(name, Tensor, "dense")

    def _column(self, name: str, kind: type[Kind], called: str) -> Kind:
        column = self.batch.get(name)
        if not isinstance(column, kind):
            got = type(column).__name__
            raise DataError(f"unknown {called} column", field=name, got=got, expected=self.columns)
        return column

    def __getitem__(self, rows: int | RowIndex) -> DataProto:
        """Return the given rows in the given order.

        A boolean mask filters the rows. One integer gives a table with one row.
        """
        if isinstance(rows, int):
            rows = [rows]
        taken = DataProto.gather([self], picks(rows, len(self)))
        taken.meta_info = dict(self.meta_info)
        return taken

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """Return a table with only the named columns; None keeps all columns of the argument's group.

        Raises:
            DataError: a name is unknown.
        """
        return DataProto(
            _selected(self.batch, batch_keys),
            _selected(self.non_tensor_batch, non_tensor_batch_keys),
            _selected(self.meta_info, meta_info_keys),
        )

    def pop(
        self,
        batch_keys: Iterable[str] = (),
        non_tensor_batch_keys: Iterable[str] = (),
        meta_info_keys: Iterable[str] = (),
    ) -> DataProto:
        """Remove the named columns and return them as a separate table."""
        out = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        for attribute in DataProto.__slots__:
            for name in getattr(out, attribute):
                del getattr(self, attribute)[name]
        return out

    def rename(self, old: str, new: str) -> DataProto:
        if old not in self:
            raise DataError("unknown column", field=old, expected=self.columns)
        return DataProto(
            {new if name == old else name: value for name, value in self.batch.items()},
            {new if name == old else name: value for name, value in self.non_tensor_batch.items()},
            self.meta_info,
        )

    def union(self, *others: DataProto) -> DataProto:
        """Return a table with the columns of all tables, which must have the same rows.

        Raises:
            DataError: two tables have different values for the same name, or different numbers of rows.
        """
        batch, arrays, meta = dict(self.batch), dict(self.non_tensor_batch), dict(self.meta_info)
        for other in others:
            remedy = "select or rename columns before union"
            merge(batch, other.batch, remedy)
            merge(arrays, other.non_tensor_batch, remedy)
            merge(meta, other.meta_info, remedy)
        return DataProto(batch, arrays, meta)

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """Concatenate the rows of all tables; `merged_meta_info` merges their meta_info.

        Raises:
            DataError: the tables have different columns, or their meta_info cannot be merged.
        """
        return DataProto.gather(parts, range(sum(map(len, parts))))

    @staticmethod
    def gather(parts: Sequence[DataProto], rows: Picks) -> DataProto:
        """Return `concat(parts)[rows]`, but copy each value at most once.

        Consecutive rows of one part are returned as views.

        Raises:
            DataError: `parts` is empty, the parts have different columns, or their meta_info cannot be
                merged.
        """
        if not parts:
            raise DataError("nothing to concatenate", expected="at least one table")
        first = parts[0]
        for part in parts[1:]:
            if set(part.columns) != set(first.columns):
                raise DataError("tables have different columns", got=part.columns, expected=first.columns)
        plan = Gather([len(part) for part in parts], rows)
        batch: dict[str, Column] = {}
        for name in first.batch:
            if any(isinstance(part.batch[name], Ragged) for part in parts):
                batch[name] = Ragged.gather([part.ragged(name) for part in parts], plan)
            else:
                batch[name] = plan.dense([part.dense(name) for part in parts])
        arrays = {
            name: plan.array([part.non_tensor_batch[name] for part in parts])
            for name in first.non_tensor_batch
        }
        return DataProto._trusted(batch, arrays, merged_meta_info([part.meta_info for part in parts]))

    def chunk(self, chunks: int) -> list[DataProto]:
        """Split the rows into `chunks` tables whose sizes differ by at most one.

        If there are fewer rows than chunks, some tables are empty.
        """
        if chunks < 1:
            raise DataError("out of range", field="chunks", got=chunks, expected=">= 1")
        return self._cut(even(len(self), chunks))

    def split(self, size: int) -> list[DataProto]:
        """Split the rows into tables of `size` rows; the last table may be smaller."""
        if size < 1:
            raise DataError("out of range", field="size", got=size, expected=">= 1")
        return self._cut([slice(i, min(i + size, len(self))) for i in range(0, len(self), size)])

    def _cut(self, spans: Sequence[slice]) -> list[DataProto]:
        """Return consecutive slices of all rows as views; each column is split in one call."""
        tables = [DataProto._trusted({}, {}, self.meta_info) for _ in spans]
        sizes = [span.stop - span.start for span in spans]
        families: dict[int, tuple[list[int], list[Tensor]]] = {}
        for name, column in self.batch.items():
            if isinstance(column, Ragged):
                family = families.get(id(column.offsets))
                if family is None:
                    family = families[id(column.offsets)] = cut_offsets(column.offsets, spans)
                for i, values in enumerate(column.values.split_with_sizes(family[0])):
                    tables[i].batch[name] = Ragged.trusted(values, family[1][i])
            else:
                for i, rows in enumerate(column.split_with_sizes(sizes)):
                    tables[i].batch[name] = rows
        for name, array in self.non_tensor_batch.items():
            for table, span in zip(tables, spans, strict=True):
                table.non_tensor_batch[name] = array[span]
        return tables

    @classmethod
    def _trusted(
        cls, batch: dict[str, Column], arrays: dict[str, np.ndarray], meta_info: dict[str, Any]
    ) -> DataProto:
        """Build a table without checks, from columns that are known to have equal numbers of rows.

        The table keeps the given dicts `batch` and `arrays` and does not copy them.
        """
        table = cls.__new__(cls)
        table.batch = batch
        table.non_tensor_batch = arrays
        table.meta_info = dict(meta_info)
        return table

    def repeat(self, repeat_times: int | Sequence[int] | Tensor, interleave: bool = True) -> DataProto:
        """Repeat the rows.

        Args:
            repeat_times: one number for all rows, or one number per row.
            interleave: whether the copies of a row follow each other; otherwise the whole table is repeated,
                which needs one number for all rows.
        """
        rows, times = torch.arange(len(self)), torch.as_tensor(repeat_times)
        return self[rows.repeat_interleave(times) if interleave else rows.repeat(int(times))]

    def reorder(self, indices: Tensor | Sequence[int]) -> DataProto:
        """Return a table whose row i is row indices[i] of this table.

        Raises:
            DataError: the indices are not a permutation of the rows.
        """
        index = row_index(indices, len(self))
        if not torch.equal(index.sort().values, torch.arange(len(self))):
            raise DataError("not a permutation of the rows", field="indices", got=index.tolist()[:8])
        return self[index]

    def filter(self, mask: Tensor | np.ndarray | Sequence[bool]) -> DataProto:
        """Return the rows at which `mask` is true."""
        return self[torch.as_tensor(np.asarray(mask), dtype=torch.bool)]

    def to(self, device: torch.device | str) -> DataProto:
        moved = {name: column.to(device) for name, column in self.batch.items()}
        return DataProto(moved, self.non_tensor_batch, self.meta_info)

    def clone(self) -> DataProto:
        """Copy the columns to new memory; the objects in object arrays are shared."""
        copies: dict[int, Tensor] = {}  # columns that share an offsets tensor also share its copy

        def cloned(tensor: Tensor) -> Tensor:
            return copies.setdefault(id(tensor), tensor.clone())

        return DataProto(
            {
                name: Ragged(c.values.clone(), cloned(c.offsets)) if isinstance(c, Ragged) else c.clone()
                for name, c in self.batch.items()
            },
            {name: array.copy() for name, array in self.non_tensor_batch.items()},
            self.meta_info,
        )

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]:
        """Return the state to pickle. A tensor object that several columns share occurs only once."""
        shipped: dict[int, Shipped] = {}

        def ship(tensor: Tensor) -> Shipped:
            return shipped.setdefault(id(tensor), Shipped(tensor))

        batch = {
            name: (ship(c.values), ship(c.offsets)) if isinstance(c, Ragged) else ship(c)
            for name, c in self.batch.items()
        }
        return batch, dict(self.non_tensor_batch), dict(self.meta_info)

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]) -> None:
        batch, self.non_tensor_batch, self.meta_info = state
        self.batch = {
            name: Ragged(*map(unwrap, c)) if isinstance(c, tuple) else unwrap(c) for name, c in batch.items()
        }

    def save(self, path: str | Path) -> None:
        """Write the table to one file.

        `load` can read the file if the arrays and `meta_info` contain only tensors, arrays and plain values.
        """
        batch = {
            name: {"values": c.values, "offsets": c.offsets} if isinstance(c, Ragged) else c
            for name, c in self.batch.items()
        }
        torch.save({"batch": batch, "arrays": self.non_tensor_batch, "meta": self.meta_info}, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> DataProto:
        """Read a file that `save` wrote.

        Code in the file is never run, so files from unknown sources are safe to load.

        Raises:
            DataError: the file does not exist, or contains objects of other types.
        """
        state = load_plain(Path(path), refused=DataError, field=str(path))
        batch = {
            name: Ragged(c["values"], c["offsets"]) if isinstance(c, dict) else c
            for name, c in state["batch"].items()
        }
        return cls(batch, state["arrays"], state["meta"])


def object_array(column: np.ndarray | Sequence[Any]) -> np.ndarray:
    """Convert a column to a one-dimensional object array (B), even if the elements are sequences."""
    if isinstance(column, np.ndarray) and column.dtype == object and column.ndim == 1:
        return column
    out = np.empty(len(column), dtype=object)
    out[:] = list(column)
    return out


def _selected(table: dict[str, Any], names: Iterable[str] | None) -> dict[str, Any]:
    if names is None:
        return dict(table)
    names = list(names)
    for name in names:
        if name not in table:
            raise DataError("unknown column", field=name, expected=tuple(table))
    return {name: table[name] for name in names}
