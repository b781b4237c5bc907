"""The parts of a policy's worker: a worker holds some of actor, rollout and reference, and offers their
methods as its own.

A part's method takes the worker after `self`, for its timeline, its observations and its process group; the
part keeps no worker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

from tandem.errors import EngineError
from tandem.workers.base import EngineWorker

PolicyPart = Literal["actor", "rollout", "ref"]


class Composed(Protocol):
    """A worker of parts."""

    @property
    def parts(self) -> Mapping[PolicyPart, Any]:
        """The parts that live in it, by name."""
        ...


P = ParamSpec("P")
R = TypeVar("R")
Held = TypeVar("Held")


def offered(
    part: PolicyPart, method: Callable[Concatenate[Held, EngineWorker, P], R]
) -> Callable[Concatenate[Composed, P], R]:
    """A worker's method that one of its parts does, with the registration and docstring of the part's.

    Args:
        part: its name.
        method: of the part's class; a subclass of that may have its own.

    Raises:
        EngineError: when called, the worker was made without the part.
    """

    @functools.wraps(method)
    def call(worker: Composed, /, *args: P.args, **kwargs: P.kwargs) -> R:
        found: R = getattr(held(worker, part), method.__name__)(worker, *args, **kwargs)
        return found

    return call


def held(worker: Composed, part: PolicyPart) -> Any:
    """A part of the worker.

    Raises:
        EngineError: the worker was made without it.
    """
    if part not in worker.parts:
        raise missing(part, ", ".join(worker.parts))
    return worker.parts[part]


def missing(wanted: str, got: str) -> EngineError:
    return EngineError(
        "this worker does not hold that part of the policy",
        got=f"the parts {got}",
        expected=wanted,
        remedy="call the method on the group whose workers were made with that part",
    )
