"""A sandbox that runs programs written by a model, on this machine or on a server.

The input is a program and its standard input, the result is what the program wrote.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.sandbox import local, remote
from tandem.sandbox.local import Run, protection
from tandem.sandbox.protections import Limits

__all__ = ["Limits", "Place", "Run", "place", "protection", "run", "use"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how programs run.

    Attributes:
        url: URL of a sandbox server; None means this machine.
        limits: limits of each program.
        at_once: how many programs this process may run at the same time.
    """

    url: str | None = None
    limits: Limits = field(default_factory=Limits)
    at_once: int = 1


_PLACE = [Place()]


def use(place: Place) -> None:
    """Set where this process runs all its programs."""
    _PLACE[0] = place


def place() -> Place:
    """Return where this process runs programs."""
    return _PLACE[0]


def run(program: str, stdin: str) -> Run:
    """Run a Python program in the place that `use` set.

    Raises:
        RewardError: this machine has no sandbox, or the server does not answer.
    """
    (chosen,) = _PLACE
    if chosen.url is None:
        return local.run(program, stdin, chosen.limits)
    return remote.run(program, stdin, chosen.limits, chosen.url)
