"""The parts of a worker: it holds some, such as actor, rollout and reference, and offers their methods as its
own.

A part's method takes the worker after `self`, for its timeline, its observations and its process group; the
part keeps no worker.
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

    The worker has its parts in `parts`, by name. One whose class is a subclass of that given here may have
    methods of its own under these names.

    Args:
        parts: the parts' classes by name.
    """

    def add(worker: W) -> W:
        for part, kind in parts.items():
            for name in registrations(kind):
                setattr(worker, name, _offered(part, getattr(kind, name)))
        return worker

    return add


def _offered(part: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A worker's method that one of its parts does.

    Raises:
        EngineError: when called, the worker was made without the part.
    """

    @functools.wraps(method)
    def call(worker: Any, /, *args: Any, **kwargs: Any) -> Any:
        if part not in worker.parts:
            raise missing(part, ", ".join(worker.parts))
        return getattr(worker.parts[part], method.__name__)(worker, *args, **kwargs)

    return call


def missing(wanted: str, got: str) -> EngineError:
    return EngineError(
        "this worker does not hold that part",
        got=f"the parts {got}",
        expected=wanted,
        remedy="call the method on the group whose workers were made with that part",
    )
