"""One worker's promised result: the handle by which a backend knows it, and the source by which expressions
know it where it is a batch."""

from __future__ import annotations

from concurrent.futures import Future as Running
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.protocol import DataProto
from tandem.runtime.index import Index, require_batch


class Handle(Protocol):
    """One worker's promised result, as a backend knows it. Where results travel between processes, it must be
    picklable and work in any of them. All waits raise what the method raised, and TimeoutError after
    `timeout_s` seconds (None: the backend's own limit)."""

    @property
    def borrowed(self) -> bool:
        """Tells whether `get` may give tensors on memory that others read; nobody may write to them."""

    def get(self, timeout_s: float | None = None) -> Any:
        """The value, brought here."""

    def index(self, timeout_s: float | None = None) -> Index:
        """The index of a result that is a DataProto; moves no values."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Until the method has ended; moves no values."""

    def done(self) -> bool:
        """Tells whether the method has ended, well or not; does not wait."""


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """The handle of a result that is already here. Where it was read from a pickle, it may lie on memory
    that others read."""

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
class Aside:
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
    """One worker's promised batch; the leaves of expressions.

    Args:
        handle: where it is.
        method: the method that makes it, for messages.
        shape: rows and names of columns, once known; travels with the source, so that a worker need not
            ask for them again.
    """

    handle: Handle
    method: str
    shape: tuple[int, tuple[str, ...]] | None = None
    _index: Index | None = field(default=None, init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Source, (self.handle, self.method, self.shape)

    def ready(self) -> bool:
        """Tells whether the index is there without waiting for a worker."""
        return self._index is not None or self.handle.done()

    def index(self, timeout_s: float | None) -> Index:
        if self._index is None:
            here = isinstance(self.handle, Done)
            self._index = Index.of(self.batch(timeout_s)) if here else self.handle.index(timeout_s)
            self.shape = len(self._index), self._index.columns
        return self._index

    def batch(self, timeout_s: float | None) -> DataProto:
        """The values.

        Raises:
            DataError: the method returned something else.
        """
        return require_batch(self.handle.get(timeout_s), f"{self.method} did not return a batch")
