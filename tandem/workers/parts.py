"""A mechanism to build a worker from parts, such as actor, rollout and reference.

The registered methods of the parts become methods of the worker. A part's method receives the worker as its
first argument after `self`. It uses the worker's timeline, metrics and process group. The part stores no
reference to the worker.
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
    """Return a class decorator that adds the registered methods of parts to a worker class.

    The methods keep their registrations and docstrings. The worker's attribute `parts` is a dict from name to
    part. A part may also be an instance of a subclass of the class given here. The subclass may override
    methods.

    Args:
        parts: The class of each part. The keyword is the part's name.
    """

    def add(worker: W) -> W:
        for part, kind in parts.items():
            for name in registrations(kind):
                setattr(worker, name, _delegating(part, getattr(kind, name)))
        return worker

    return add


def _delegating(part: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method for the worker that calls the method of a part.

    Raises:
        EngineError: The worker does not have the part. The returned method raises this error when it is
            called.
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
