"""Futures: results that may not exist yet and live with the workers that made them.

A BatchFuture is a small expression over such results (select, union, rows, chunk). The controller
composes expressions and reads their index; values are put together only where they are used: in
the worker that receives the future as an argument, or in the controller that calls `get`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from tandem.balance import even
from tandem.errors import DataError
from tandem.protocol import DataProto
from tandem.protocol.gather import Picks
from tandem.protocol.ragged import RowIndex, picks
from tandem.runtime.expression import (
    Balanced,
    Division,
    Node,
    Operation,
    balanced,
    chunk_of,
    evaluation,
    rows_of,
    sources,
    written,
)
from tandem.runtime.handle import Done, Handle, Source
from tandem.runtime.index import Index
from tandem.runtime.layout import Layout, compact

__all__ = ["BatchFuture", "Done", "Future", "Handle", "division", "resolve"]

Result = TypeVar("Result")


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
    Rows and chunks of a batch whose methods have ended name only the results that they need.
    """

    __slots__ = ("_index", "_layout", "_node")

    def __init__(self, node: Node, index: Callable[[], Index] | None = None) -> None:
        self._node = node
        self._index: Index | Callable[[], Index] | None = index
        self._layout: Layout | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the expression. Of what this process holds itself, only the wanted rows and columns travel,
        where it is known which they are."""
        node = self._node
        if any(isinstance(s.handle, Done) for s in sources(node)) and self.ready():
            node = written(self._laid_out(), settle=True)
        return BatchFuture, (node,)

    @classmethod
    def of(cls, batch: DataProto) -> BatchFuture:
        """A batch of the controller's own as a future, for union with others."""
        return cls(Source(Done(batch), "BatchFuture.of"))

    @classmethod
    def collected(
        cls, handles: Sequence[Handle], method: str, division: Division | None = None
    ) -> BatchFuture:
        """The rows of all workers' results below each other, in the order of `handles`.

        Args:
            handles: at least one.
            method: the name of the method that was called, for messages.
            division: of the rows that the workers were given; its order is restored.
        """
        results = tuple(Source(handle, method) for handle in handles)
        if division is not None:
            return cls(Operation("restore", results, (division,)))
        return cls(results[0] if len(results) == 1 else Operation("concat", results))

    @classmethod
    def concat(cls, parts: Sequence[BatchFuture]) -> BatchFuture:
        """The rows of all parts below each other.

        Raises:
            DataError: no parts.
        """
        if not parts:
            raise DataError("nothing to concatenate", expected="at least one batch")
        return cls(Operation("concat", tuple(part._node for part in parts)))

    @classmethod
    def arranged(cls, parts: Sequence[BatchFuture], places: Sequence[np.ndarray]) -> BatchFuture:
        """The rows of all parts, row i of part p at places[p][i]."""
        division = tuple(place.astype(np.int32) for place in places)
        return cls(Operation("restore", tuple(part._node for part in parts), (division,)))

    @property
    def index(self) -> Index:
        """Waits for the index only.

        Raises:
            DataError: select of a missing column, union of batches that do not fit.
        """
        if not isinstance(self._index, Index):
            self._index = self._index() if self._index else self._laid_out().index(_forever)
        return self._index

    def ready(self) -> bool:
        """Tells whether the index is there without waiting for a method to end."""
        return self._index is not None or all(s.ready() for s in sources(self._node))

    def get(self, timeout_s: float | None = None) -> DataProto:
        """Brings the values here. The table is the caller's own. Its tensors may be shared within this
        process, never with another.

        Raises:
            DataError: select of a missing column, union of batches that do not fit, or a method
                that returned no DataProto.
            TimeoutError: not there after `timeout_s` seconds.
        """
        left = _countdown(timeout_s)
        fetch: Callable[[Source], DataProto] = functools.cache(lambda source: source.batch(left()))
        return (self._layout or evaluation(left)(self._node)).take(fetch)

    def __len__(self) -> int:
        return len(self.index)

    def select(self, *columns: str) -> BatchFuture:
        """Only the named columns.

        Raises:
            DataError: none are named.
        """
        if not columns:
            raise DataError("no columns to select", expected="at least one name")
        return BatchFuture(Operation("select", (self._node,), (columns,)))

    def union(self, *others: BatchFuture | DataProto) -> BatchFuture:
        """The columns of all side by side."""
        futures = [BatchFuture.of(o) if isinstance(o, DataProto) else o for o in others]
        return BatchFuture(Operation("union", (self._node, *(future._node for future in futures))))

    def rows(self, indices: RowIndex) -> BatchFuture:
        """The named rows in the given order; a boolean tensor filters."""
        if self.ready():
            return self._part(picks(indices, len(self)))
        return BatchFuture(rows_of(self._node, compact(indices)))

    def chunk(self, chunks: int, balance: str | None = None) -> list[BatchFuture]:
        """`chunks` parts; does not wait.

        Args:
            balance: the ragged column by whose row lengths the parts are made nearly equal, rows ascending
                in each; without it their sizes differ by one at most, as in DataProto.chunk.
        """
        if chunks < 1:
            raise DataError("chunks below one", field="chunks", got=chunks, expected=">= 1")
        if chunks == 1:
            return [self]
        if balance is not None:
            return self.divided(division([self], chunks, balance))
        if self.ready():
            return [self.rows(span) for span in even(len(self), chunks)]
        return [BatchFuture(chunk_of(self._node, i, chunks)) for i in range(chunks)]

    def divided(self, division: Division) -> list[BatchFuture]:
        """The shares of a division; does not wait."""
        if isinstance(division, tuple) and self.ready():
            return [self._part(rows) for rows in division]
        return [BatchFuture(Operation("share", (self._node,), (division, i))) for i in range(len(division))]

    def split(self, size: int) -> list[BatchFuture]:
        """Parts of `size` rows, the last may be smaller; waits for the index, to know how many."""
        if size < 1:
            raise DataError("split size below one", field="size", got=size, expected=">= 1")
        return [self.rows(slice(start, start + size)) for start in range(0, len(self), size)]

    def _part(self, rows: Picks) -> BatchFuture:
        """Rows of a batch that can be laid out."""
        node = written(self._laid_out()[rows])
        return BatchFuture(node, functools.partial(Index.__getitem__, self.index, rows))

    def _laid_out(self) -> Layout:
        if self._layout is None:
            self._layout = evaluation(_forever)(self._node)
        return self._layout


def division(batches: Sequence[BatchFuture], parts: int, column: str) -> Division:
    """The balanced division of batches of the same samples; does not wait.

    Args:
        column: the ragged column by whose row lengths the shares are made nearly equal.
    """
    if all(batch.ready() for batch in batches):
        return tuple(balanced([batch.index for batch in batches], column, parts))
    return Balanced(tuple(batch._node for batch in batches), column, parts)


def resolve(argument: Any, *, borrowed: bool = False) -> Any:
    """Turns an argument into what a worker's method gets: of a future its value, of a batch a table of the
    worker's own.

    Args:
        borrowed: whether the argument came from another process, so that a batch may lie on memory that
            others read; it is copied. Otherwise its tensors are shared with the caller's.
    """
    if isinstance(argument, (BatchFuture, Future)):
        return argument.get()
    if borrowed:
        return owned(argument)
    return argument.select() if isinstance(argument, DataProto) else argument


def owned(value: Any) -> Any:
    """The value with every batch in it copied, in lists and dicts too."""
    if isinstance(value, DataProto):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(owned, value))
    if type(value) is dict:
        return {name: owned(entry) for name, entry in value.items()}
    return value


def _countdown(timeout_s: float | None) -> Callable[[], float | None]:
    """Seconds left of one limit that several waits share."""
    if timeout_s is None:
        return _forever
    deadline = time.monotonic() + timeout_s
    return lambda: max(0.0, deadline - time.monotonic())


def _forever() -> None:
    """Seconds left of no limit."""
