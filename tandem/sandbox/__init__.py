"""A sandbox that runs programs written by a model, on this machine or on a server.

The input is a program and its standard input. The result is the program's output and status.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.sandbox import local, remote
from tandem.sandbox.local import Run, protection
from tandem.sandbox.protections import Limits

__all__ = ["Limits", "Place", "Run", "place", "protection", "run", "use"]


@dataclass(frozen=True, slots=True)
class Place:
    """The sandbox for programs: this machine or a server, and the limits.

    Attributes:
        url: URL of a sandbox server; None: this machine.
        limits: limits of each program.
        at_once: maximum number of programs that this process runs at the same time.
    """

    url: str | None = None
    limits: Limits = field(default_factory=Limits)
    at_once: int = 1


_PLACE = [Place()]


def use(place: Place) -> None:
    """Set the sandbox for all programs of this process."""
    _PLACE[0] = place


def place() -> Place:
    """Return the sandbox that `use` has set for this process."""
    return _PLACE[0]


def run(program: str, stdin: str) -> Run:
    """Run a Python program in the sandbox that `use` has set.

    Raises:
        RewardError: this machine has no sandbox, or the server does not answer.
    """
    (chosen,) = _PLACE
    if chosen.url is None:
        return local.run(program, stdin, chosen.limits)
    return remote.run(program, stdin, chosen.limits, chosen.url)
