"""Handle: one worker's promised result, as a backend knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tandem.runtime.index import Index


class Handle(Protocol):
    """Where results travel between processes a handle must be picklable and work in any of them. All
    waits raise what the method raised, and TimeoutError after `timeout_s` seconds (None: the backend's
    own limit)."""

    @property
    def borrowed(self) -> bool:
        """Whether `get` may give tensors on memory that others read; nobody may write to them."""
        ...

    def get(self, timeout_s: float | None = None) -> Any:
        """The value, brought here."""
        ...

    def index(self, timeout_s: float | None = None) -> Index:
        """The index of a result that is a DataProto; moves no values."""
        ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Until the method has ended; moves no values."""
        ...

    def done(self) -> bool:
        """Whether the method has ended, well or not; does not wait."""
        ...


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
