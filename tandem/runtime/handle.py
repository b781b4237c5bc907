"""Handles and sources: references to one worker's result, which may not exist yet.

A backend identifies the result by its handle. Expressions over batches refer to the result with a source.
"""

from __future__ import annotations

from concurrent.futures import Future as Running
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.protocol import DataProto
from tandem.runtime.index import Index, require_batch


class Handle(Protocol):
    """A backend's reference to one worker's result, which may not exist yet.

    If results travel between processes, a handle must be picklable and work in every process. All methods
    that wait raise the exception that the worker's method raised, and TimeoutError after `timeout_s` seconds.
    None means the backend's limit.
    """

    @property
    def borrowed(self) -> bool:
        """Whether `get` may return tensors in shared memory. Do not change such tensors."""

    def get(self, timeout_s: float | None = None) -> Any:
        """Copy the value to this process and return it."""

    def index(self, timeout_s: float | None = None) -> Index:
        """Return the index of a result that is a DataProto, without moving values."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the method has ended, without moving values."""

    def done(self) -> bool:
        """Return without waiting whether the method has ended, with or without an error."""


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """The handle of a result that is already in this process.

    A result that was unpickled may use memory that other processes read; see `borrowed`.
    """

    value: Any
    borrowed: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Done, (self.value, True)

    def get(self, timeout_s: float | None = None) -> Any:
        return self.value

    def index(self, timeout_s: float | None = None) -> Index:
        return Index.of(self.value)

    def wait(self, timeout_s: float | None = None) -> None:
        return

    def done(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, eq=False)
class InThread:
    """The handle of a result that a thread of this process computes."""

    running: Running[Any]
    borrowed: bool = False

    def get(self, timeout_s: float | None = None) -> Any:
        return self.running.result(timeout_s)

    def index(self, timeout_s: float | None = None) -> Index:
        return Index.of(self.get(timeout_s))

    def wait(self, timeout_s: float | None = None) -> None:
        self.running.exception(timeout_s)

    def done(self) -> bool:
        return self.running.done()


@dataclass(slots=True, eq=False, repr=False)
class Source:
    """A leaf of expressions: the batch that one worker's method returns.

    Args:
        handle: The handle of the batch.
        method: The method that makes the batch, for messages.
        shape: The number of rows and the names of the columns; None while unknown. The shape is pickled with
            the source, so that a worker need not request it again.
    """

    handle: Handle
    method: str
    shape: tuple[int, tuple[str, ...]] | None = None
    _index: Index | None = field(default=None, init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Source, (self.handle, self.method, self.shape)

    def ready(self) -> bool:
        """Return whether the index is available without waiting for a worker."""
        return self._index is not None or self.handle.done()

    def index(self, timeout_s: float | None) -> Index:
        if self._index is None:
            here = isinstance(self.handle, Done)
            self._index = Index.of(self.batch(timeout_s)) if here else self.handle.index(timeout_s)
            self.shape = len(self._index), self._index.columns
        return self._index

    def batch(self, timeout_s: float | None) -> DataProto:
        """Return the values.

        Raises:
            DataError: The method did not return a batch.
        """
        return require_batch(self.handle.get(timeout_s), f"{self.method} did not return a batch")
