"""A sandbox for a model's programs, on this machine or on a server: a program and its input go in, what it
wrote comes out."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.sandbox import local, remote
from tandem.sandbox.local import Run, protection
from tandem.sandbox.protections import Limits

__all__ = ["Limits", "Place", "Run", "place", "protection", "run", "use"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where programs run.

    Attributes:
        url: a server's; None: this machine.
        limits: of each program.
        at_once: how many programs this process may have running.
    """

    url: str | None = None
    limits: Limits = field(default_factory=Limits)
    at_once: int = 1


_PLACE = [Place()]


def use(place: Place) -> None:
    """Makes a place that of all programs of this process."""
    _PLACE[0] = place


def place() -> Place:
    """Where this process runs programs."""
    return _PLACE[0]


def run(program: str, stdin: str) -> Run:
    """Runs a Python program where `use` said.

    Raises:
        RewardError: this machine has no sandbox, or the server does not answer.
    """
    (chosen,) = _PLACE
    if chosen.url is None:
        return local.run(program, stdin, chosen.limits)
    return remote.run(program, stdin, chosen.limits, chosen.url)
