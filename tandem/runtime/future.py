"""Futures: results that may not exist yet and live with the workers that made them.

A BatchFuture is a small expression over such results (select, union, rows, chunk). The controller
composes expressions and reads their index; values are put together only where they are used: in
the worker that receives the future as an argument, or in the controller that calls `get`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from tandem.errors import DataError
from tandem.protocol import DataProto
from tandem.protocol.ragged import RowIndex
from tandem.runtime.index import Index

Table = TypeVar("Table", DataProto, Index)
Result = TypeVar("Result")


class Handle(Protocol):
    """One worker's promised result, as a backend knows it. Where results travel between processes
    a handle must be picklable and work in any of them. All waits raise what the method raised, and
    TimeoutError after `timeout_s` seconds (None: the backend's own limit)."""

    def get(self, timeout_s: float | None = None) -> Any:
        """The value, brought here."""
        ...

    def index(self, timeout_s: float | None = None) -> Index:
        """The index of a result that is a DataProto; moves no values."""
        ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Until the method has ended; moves no values."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """The handle of a result that is already here."""

    value: Any

    def get(self, timeout_s: float | None = None) -> Any:
        return self.value

    def index(self, timeout_s: float | None = None) -> Index:
        return Index.of(self.value)

    def wait(self, timeout_s: float | None = None) -> None:
        return


class Future(Generic[Result]):
    """A result that is no batch.

    Args:
        handles: one per worker; None for a worker that was not called.
        collect: all workers' results, in order of rank, to the method's result.
    """

    __slots__ = ("_collect", "_handles")

    def __init__(self, handles: Sequence[Handle | None], collect: Callable[[list[Any]], Result]) -> None:
        self._handles = tuple(handles)
        self._collect = collect

    def get(self, timeout_s: float | None = None) -> Result:
        """Waits for all workers.

        Raises:
            TimeoutError: not there after `timeout_s` seconds.
        """
        left = _countdown(timeout_s)
        return self._collect([None if h is None else h.get(left()) for h in self._handles])


class BatchFuture:
    """A batch that lives with the workers. Immutable: every operation returns another future at
    once, and copies no values; only `index`, `len` and `split` wait for an index, only `get` for values.
    """

    __slots__ = ("_node",)

    def __init__(self, node: _Node) -> None:
        self._node = node

    @classmethod
    def of(cls, batch: DataProto) -> BatchFuture:
        """A batch of the controller's own as a future, for union with others."""
        return cls(_Source(Done(batch), "BatchFuture.of"))

    @classmethod
    def collected(cls, handles: Sequence[Handle], method: str) -> BatchFuture:
        """The rows of all workers' results below each other, in the order of `handles`.

        Args:
            handles: at least one.
            method: the name of the method that was called, for messages.
        """
        sources = tuple(_Source(handle, method) for handle in handles)
        return cls(sources[0] if len(sources) == 1 else _Concat(sources))

    @property
    def index(self) -> Index:
        """Waits for the index only.

        Raises:
            DataError: select of a missing column, union of batches that do not fit.
        """
        fetch: Callable[[_Source], Index] = functools.cache(_Source.index)
        return self._node.evaluate(fetch)

    def get(self, timeout_s: float | None = None) -> DataProto:
        """Brings the values here. The table is the caller's own; its tensors may be shared.

        Raises:
            DataError: select of a missing column, union of batches that do not fit, or a method
                that returned no DataProto.
            TimeoutError: not there after `timeout_s` seconds.
        """
        left = _countdown(timeout_s)
        fetch: Callable[[_Source], DataProto] = functools.cache(lambda source: source.batch(left()))
        return self._node.evaluate(fetch)

    def __len__(self) -> int:
        return len(self.index)

    def select(self, *columns: str) -> BatchFuture:
        return BatchFuture(_Select(self._node, columns))

    def union(self, *others: BatchFuture | DataProto) -> BatchFuture:
        """The columns of all side by side."""
        futures = [BatchFuture.of(o) if isinstance(o, DataProto) else o for o in others]
        return BatchFuture(_Union((self._node, *(future._node for future in futures))))

    def rows(self, indices: RowIndex) -> BatchFuture:
        """The named rows in the given order; a boolean tensor filters."""
        return BatchFuture(_Rows(self._node, indices))

    def chunk(self, chunks: int) -> list[BatchFuture]:
        """`chunks` parts whose sizes differ by one at most, as DataProto.chunk; does not wait."""
        if chunks < 1:
            raise DataError("chunks below one", field="chunks", got=chunks, expected=">= 1")
        if chunks == 1:
            return [self]
        return [BatchFuture(_Chunk(self._node, i, chunks)) for i in range(chunks)]

    def split(self, size: int) -> list[BatchFuture]:
        """Parts of `size` rows, the last may be smaller; waits for the index, to know how many."""
        if size < 1:
            raise DataError("split size below one", field="size", got=size, expected=">= 1")
        return [self.rows(slice(start, start + size)) for start in range(0, len(self), size)]


def resolve(argument: Any) -> Any:
    """What a worker does to each argument: a future becomes its value, and a batch a table of the
    worker's own (on shared tensors), whichever process it came from."""
    if isinstance(argument, (BatchFuture, Future)):
        return argument.get()
    return argument.select() if isinstance(argument, DataProto) else argument


class _Node(Protocol):
    """A table as an expression over workers' results; evaluated alike over values and over indices."""

    def evaluate(self, fetch: Callable[[_Source], Table]) -> Table: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    handle: Handle
    method: str

    def evaluate(self, fetch: Callable[[_Source], Table]) -> Table:
        return fetch(self)

    def index(self) -> Index:
        return self.handle.index()

    def batch(self, timeout_s: float | None) -> DataProto:
        value = self.handle.get(timeout_s)
        if not isinstance(value, DataProto):
            raise DataError(
                f"{self.method} did not return a batch",
                got=type(value).__name__,
                expected="DataProto",
                remedy='register it with collect="first" or another dispatch mode',
            )
        return value.select()  # a table of its own: who pops a column takes it from nobody else


@dataclass(frozen=True, slots=True, eq=False)
class _Concat:
    parts: tuple[_Source, ...]

    def evaluate(self, fetch: Callable[[_Source], Table]) -> Table:
        return concat([part.evaluate(fetch) for part in self.parts])


@dataclass(frozen=True, slots=True, eq=False)
class _Select:
    node: _Node
    columns: tuple[str, ...]

    def evaluate(self, fetch: Callable[[_Source], Table]) -> Table:
        table = self.node.evaluate(fetch)
        if isinstance(table, Index):
            return table.select(self.columns)
        arrays = [name for name in self.columns if name in table.non_tensor_batch]
        return table.select([name for name in self.columns if name not in arrays], arrays)


@dataclass(frozen=True, slots=True, eq=False)
class _Union:
    nodes: tuple[_Node, ...]

    def evaluate(self, fetch: Callable[[_Source], Table]) -> Table:
        tables: list[Table] = [node.evaluate(fetch) for node in self.nodes]
        return tables[0].union(*tables[1:])


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    node: _Node
    indices: RowIndex

    def evaluate(self, fetch: Callable[[_Source], Table]) -> Table:
        return self.node.evaluate(fetch)[self.indices]


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Share i of n by number alone, so that a batch can be split before its size is known."""

    node: _Node
    i: int
    n: int

    def evaluate(self, fetch: Callable[[_Source], Table]) -> Table:
        table = self.node.evaluate(fetch)
        base, extra = divmod(len(table), self.n)
        start = self.i * base + min(self.i, extra)
        return table[start : start + base + (self.i < extra)]


def concat(parts: Sequence[Table]) -> Table:
    """The rows of all parts below each other. A part without any column is what a worker may
    return for an empty share, and is left out.

    Raises:
        DataError: parts with different columns.
    """
    full: Sequence[Table] = [part for part in parts if part.columns] or parts[:1]
    return full[0].concat(full)


def _countdown(timeout_s: float | None) -> Callable[[], float | None]:
    """Seconds left of one limit that several waits share."""
    if timeout_s is None:
        return lambda: None
    deadline = time.monotonic() + timeout_s
    return lambda: max(0.0, deadline - time.monotonic())
