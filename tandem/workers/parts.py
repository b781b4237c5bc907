"""The parts of a worker, such as actor, rollout and reference.

A worker offers the methods of its parts as its own. A part's method receives the worker after `self`, for its
timeline, its metrics and its process group. The part keeps no reference to the worker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from tandem.errors import EngineError
from tandem.runtime import Worker
from tandem.runtime.worker import registrations

PolicyPart = Literal["actor", "rollout", "ref"]
W = TypeVar("W", bound=type[Worker])


def offers(**parts: type[Any]) -> Callable[[W], W]:
    """Give a worker class the registered methods of its parts, with their registrations and docstrings.

    The worker has its parts in `parts`, by name. If the class of a part is a subclass of the class given
    here, the subclass may override these methods.

    Args:
        parts: The classes of the parts, by name.
    """

    def add(worker: W) -> W:
        for part, kind in parts.items():
            for name in registrations(kind):
                setattr(worker, name, _delegating(part, getattr(kind, name)))
        return worker

    return add


def _delegating(part: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a worker's method that calls the method of one of its parts.

    Raises:
        EngineError: (when the method is called) The worker does not have the part.
    """

    @functools.wraps(method)
    def call(worker: Any, /, *args: Any, **kwargs: Any) -> Any:
        if part not in worker.parts:
            raise missing(part, ", ".join(worker.parts))
        return getattr(worker.parts[part], method.__name__)(worker, *args, **kwargs)

    return call


def missing(wanted: str, got: str) -> EngineError:
    return EngineError(
        "this worker does not have the part for this method",
        got=f"the parts {got}",
        expected=wanted,
        remedy="call the method on the worker group that was created with this part",
    )
