"""One worker's promised result.

A backend knows the result by its handle. Expressions over batches know it by its source.
"""

from __future__ import annotations

from concurrent.futures import Future as Running
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.protocol import DataProto
from tandem.runtime.index import Index, require_batch


class Handle(Protocol):
    """One worker's promised result, as a backend knows it.

    If results travel between processes, a handle must be picklable and work in every process. All methods
    that wait raise the exception that the worker's method raised, and TimeoutError after `timeout_s` seconds.
    None means the backend's own limit.
    """

    @property
    def borrowed(self) -> bool:
        """Whether `get` may return tensors in memory that others read. Such tensors must not be changed."""

    def get(self, timeout_s: float | None = None) -> Any:
        """Bring the value to this process and return it."""

    def index(self, timeout_s: float | None = None) -> Index:
        """Return the index of a result that is a DataProto, without moving values."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the method has ended, without moving values."""

    def done(self) -> bool:
        """Return without waiting whether the method has ended, with or without an error."""


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """The handle of a result that is already in this process.

    A result that was read from a pickle may use memory that others read.
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
    """One worker's promised batch, which is a leaf of expressions.

    Args:
        handle: The handle of the batch.
        method: The method that makes the batch, for messages.
        shape: The number of rows and the names of the columns, once they are known. They are pickled with the
            source, so that a worker need not ask for them again.
    """

    handle: Handle
    method: str
    shape: tuple[int, tuple[str, ...]] | None = None
    _index: Index | None = field(default=None, init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Source, (self.handle, self.method, self.shape)

    def ready(self) -> bool:
        """Return whether the index is there without waiting for a worker."""
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
