"""Futures: results that may not exist yet and that stay in the processes of the workers.

A BatchFuture is a small expression over such results (select, union, rows, chunk). The controller composes
expressions and reads their indices (row lengths and columns). Values are assembled only in the process that
uses them: in the worker that receives the future as an argument, or in the controller when it calls `get`.
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
    as_expression,
    balanced,
    chunk_of,
    evaluation,
    rows_of,
    sources,
)
from tandem.runtime.handle import Done, Handle, Source
from tandem.runtime.index import Index
from tandem.runtime.layout import Layout, compact

__all__ = ["BatchFuture", "Done", "Future", "Handle", "division", "resolve"]

Result = TypeVar("Result")


class Future(Generic[Result]):
    """A future for a result that is not a batch.

    Args:
        handles: One handle per worker; None for a worker that was not called.
        collect: A function from all workers' results, in order of rank, to the method's result.
    """

    __slots__ = ("_collect", "_handles")

    def __init__(self, handles: Sequence[Handle | None], collect: Callable[[list[Any]], Result]) -> None:
        self._handles = tuple(handles)
        self._collect = collect

    def get(self, timeout_s: float | None = None) -> Result:
        """Wait for all workers and return the result.

        Args:
            timeout_s: The longest time to wait, in seconds; None waits without a limit.

        Raises:
            TimeoutError: The result does not exist after `timeout_s` seconds.
        """
        left = _countdown(timeout_s)
        return self._collect([None if h is None else h.get(left()) for h in self._handles])


class BatchFuture:
    """A future for a batch whose values stay in the processes of the workers.

    A BatchFuture is immutable. Every operation returns another future at once and copies no values. Only
    `index`, `len` and `split` wait for an index, and only `get` waits for values. If the methods that compute
    a batch have ended, its rows and chunks only refer to the results that they need.
    """

    __slots__ = ("_index", "_layout", "_node")

    def __init__(self, node: Node, index: Callable[[], Index] | None = None) -> None:
        self._node = node
        self._index: Index | Callable[[], Index] | None = index
        self._layout: Layout | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the expression.

        If some of the results are in this process and the requested rows and columns are known, only these
        rows and columns are sent.
        """
        node = self._node
        if any(isinstance(s.handle, Done) for s in sources(node)) and self.ready():
            node = as_expression(self._laid_out(), settle=True)
        return BatchFuture, (node,)

    @classmethod
    def of(cls, batch: DataProto) -> BatchFuture:
        """Wrap a batch of this process in a future, to combine the batch with other futures."""
        return cls(Source(Done(batch), "BatchFuture.of"))

    @classmethod
    def collected(
        cls, handles: Sequence[Handle], method: str, division: Division | None = None
    ) -> BatchFuture:
        """Return the concatenated rows of all workers' results, in the order of `handles`.

        Args:
            handles: At least one handle.
            method: The name of the called method, for messages.
            division: The rows that each worker received. The result's rows are put back into the order of the
                undivided batch.
        """
        results = tuple(Source(handle, method) for handle in handles)
        if division is not None:
            return cls(Operation("restore", results, (division,)))
        return cls(results[0] if len(results) == 1 else Operation("concat", results))

    @classmethod
    def concat(cls, parts: Sequence[BatchFuture]) -> BatchFuture:
        """Return the concatenated rows of all parts.

        Raises:
            DataError: There are no parts.
        """
        if not parts:
            raise DataError("nothing to concatenate", expected="at least one batch")
        return cls(Operation("concat", tuple(part._node for part in parts)))

    @classmethod
    def arranged(cls, parts: Sequence[BatchFuture], places: Sequence[np.ndarray]) -> BatchFuture:
        """Return a batch with the rows of all parts. Row i of part p becomes row places[p][i]."""
        division = tuple(place.astype(np.int32) for place in places)
        return cls(Operation("restore", tuple(part._node for part in parts), (division,)))

    @property
    def index(self) -> Index:
        """The index of the batch; reading it waits for the index only.

        Raises:
            DataError: `select` named a missing column, or `union` got batches that do not match.
        """
        if not isinstance(self._index, Index):
            self._index = self._index() if self._index else self._laid_out().index(_forever)
        return self._index

    def ready(self) -> bool:
        """Return whether `index` is available without waiting for a worker's method."""
        return self._index is not None or all(s.ready() for s in sources(self._node))

    def get(self, timeout_s: float | None = None) -> DataProto:
        """Copy the values to this process and return the batch.

        The caller may change the batch. Its tensors may share memory with other tensors in this process, but
        never with another process.

        Args:
            timeout_s: The longest time to wait, in seconds; None waits without a limit.

        Raises:
            DataError: `select` named a missing column, `union` got batches that do not match, or a method did
                not return a DataProto.
            TimeoutError: The batch does not exist after `timeout_s` seconds.
        """
        left = _countdown(timeout_s)
        fetch: Callable[[Source], DataProto] = functools.cache(lambda source: source.batch(left()))
        return (self._layout or evaluation(left)(self._node)).take(fetch)

    def __len__(self) -> int:
        return len(self.index)

    def select(self, *columns: str) -> BatchFuture:
        """Return only the named columns.

        Raises:
            DataError: No columns are given.
        """
        if not columns:
            raise DataError("no columns to select", expected="at least one name")
        return BatchFuture(Operation("select", (self._node,), (columns,)))

    def union(self, *others: BatchFuture | DataProto) -> BatchFuture:
        """Return a batch with the columns of all batches, which must have the same rows."""
        futures = [BatchFuture.of(o) if isinstance(o, DataProto) else o for o in others]
        return BatchFuture(Operation("union", (self._node, *(future._node for future in futures))))

    def rows(self, indices: RowIndex) -> BatchFuture:
        """Return the rows with the given row numbers, in the given order; a boolean tensor filters rows."""
        if self.ready():
            return self._part(picks(indices, len(self)))
        return BatchFuture(rows_of(self._node, compact(indices)))

    def chunk(self, chunks: int, balance: str | None = None) -> list[BatchFuture]:
        """Divide the batch into `chunks` parts without waiting.

        Args:
            chunks: The number of parts.
            balance: The ragged column whose row lengths are balanced over the parts; the rows of a part stay
                in ascending order. None: the sizes of the parts differ by at most one, as in DataProto.chunk.

        Raises:
            DataError: `chunks` is below one.
        """
        if chunks < 1:
            raise DataError("the number of chunks is below one", field="chunks", got=chunks, expected=">= 1")
        if chunks == 1:
            return [self]
        if balance is not None:
            return self.divided(division([self], chunks, balance))
        if self.ready():
            return [self.rows(span) for span in even(len(self), chunks)]
        return [BatchFuture(chunk_of(self._node, i, chunks)) for i in range(chunks)]

    def divided(self, division: Division) -> list[BatchFuture]:
        """Return one batch per row group of a division, without waiting."""
        if isinstance(division, tuple) and self.ready():
            return [self._part(rows) for rows in division]
        return [BatchFuture(Operation("share", (self._node,), (division, i))) for i in range(len(division))]

    def split(self, size: int) -> list[BatchFuture]:
        """Divide the batch into parts of `size` rows; the last part may be smaller.

        This method waits for the index, because the number of parts depends on it.

        Raises:
            DataError: `size` is below one.
        """
        if size < 1:
            raise DataError("the split size is below one", field="size", got=size, expected=">= 1")
        return [self.rows(slice(start, start + size)) for start in range(0, len(self), size)]

    def _part(self, rows: Picks) -> BatchFuture:
        """Return some rows of this batch; the batch's layout must already be known."""
        node = as_expression(self._laid_out()[rows])
        return BatchFuture(node, functools.partial(Index.__getitem__, self.index, rows))

    def _laid_out(self) -> Layout:
        if self._layout is None:
            self._layout = evaluation(_forever)(self._node)
        return self._layout


def division(batches: Sequence[BatchFuture], parts: int, column: str) -> Division:
    """Return the balanced division of the rows of several batches of the same samples, without waiting.

    Args:
        batches: Batches of the same samples.
        parts: The number of row groups.
        column: The ragged column whose row lengths are balanced over the groups.
    """
    if all(batch.ready() for batch in batches):
        return tuple(balanced([batch.index for batch in batches], column, parts))
    return Balanced(tuple(batch._node for batch in batches), column, parts)


def resolve(argument: Any, *, borrowed: bool = False) -> Any:
    """Convert an argument of a call to the value that a worker's method receives.

    A future becomes its value. A batch becomes a batch that the worker may change.

    Args:
        argument: The argument.
        borrowed: Whether the argument came from another process. A batch may then use memory that other
            processes read, so it is copied. Otherwise the worker's batch shares its tensors with the caller.
    """
    if isinstance(argument, (BatchFuture, Future)):
        return argument.get()
    if borrowed:
        return owned(argument)
    return argument.select() if isinstance(argument, DataProto) else argument


def owned(value: Any) -> Any:
    """Return the value with a copy of every batch in it, including batches in lists and dicts."""
    if isinstance(value, DataProto):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(owned, value))
    if type(value) is dict:
        return {name: owned(entry) for name, entry in value.items()}
    return value


def _countdown(timeout_s: float | None) -> Callable[[], float | None]:
    """Return a function that returns the seconds that remain of a time limit for several waits."""
    if timeout_s is None:
        return _forever
    deadline = time.monotonic() + timeout_s
    return lambda: max(0.0, deadline - time.monotonic())


def _forever() -> None:
    """Return None, the remaining time if there is no limit."""
