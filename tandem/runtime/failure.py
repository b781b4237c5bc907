"""Failures of workers: the records of what happened, and the report that is made of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tandem.errors import TandemError, WorkerFailure

OTHERS = 16
"""Other processes that the report names."""
LOG_LINES = 30
"""Last lines of a failed worker's log that the report shows."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process of a pool.

    Attributes:
        pool, rank, world_size: which process of which pool.
        node: its machine's address.
        pid: its process id there.
        log: the file its output goes to.
    """

    pool: str
    rank: int
    world_size: int
    node: str
    pid: int
    log: Path

    def __str__(self) -> str:
        return f"{self.pool} rank {self.rank} of {self.world_size} (node {self.node}, pid {self.pid})"


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A call that raised.

    Attributes:
        pool, rank: where.
        role, method: the call.
        error: the exception in one line.
        trace: its traceback.
        cause: the exception, where it can be pickled.
        inputs: whether an input could not be had, so that somebody else failed first.
        at: when, seconds since the epoch on the worker's machine.
    """

    pool: str
    rank: int
    role: str
    method: str
    error: str
    trace: str
    cause: BaseException | None
    inputs: bool = False
    at: float = field(default_factory=time.time)


class CallFailed(Exception):
    """The error that a worker's process sends in place of a result; it holds the failed call's record."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self.record = record


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a worker's process, as it answers when asked.

    Attributes:
        state: "idle", "waiting for the inputs of" or "running".
        role, method: of the call it is at.
        since_s: seconds in that state.
        resident_bytes: memory of the process.
        failures: calls that raised since the last answer.
        said: sentences for the user since then.
    """

    state: str
    role: str
    method: str
    since_s: float
    resident_bytes: int
    failures: tuple[Record, ...] = ()
    said: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.state == "idle":
            return "idle"
        return f"{self.state} {self.role}.{self.method} for {self.since_s:.1f} s"


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a run cannot go on: the first thing that went wrong, and where.

    Attributes:
        place: the process.
        what: in one sentence.
        role, method: the call it was at, where known.
        detail: its traceback or stacks.
        cause: the exception, where there is one.
    """

    place: Place
    what: str
    role: str = ""
    method: str = ""
    detail: str = ""
    cause: BaseException | None = None

    def report(self, others: Mapping[Place, str]) -> WorkerFailure:
        """The error for the user.

        Args:
            others: what every other process was doing.
        """
        actionable = isinstance(self.cause, TandemError)
        rank = f"{self.role or self.place.pool} rank {self.place.rank} of {self.place.world_size}"
        lines = [
            f"{rank} failed{f' in {self.method}' if self.method else ''}: {self.what}",
            f"  where:    pool {self.place.pool}, node {self.place.node}, pid {self.place.pid}",
        ]
        if self.detail:
            lines += ["  its stack:", *_indented(self.detail)]
        lines += [
            f"  the end of its log, {self.place.log}:",
            *_indented(tail(self.place.log, self.place.pid, but=self.detail) or "(nothing)"),
        ]
        if others:
            shown = list(others.items())[:OTHERS]
            lines += ["  meanwhile:", *(f"    {place}: {doing}" for place, doing in shown)]
        if len(others) > OTHERS:
            lines.append(f"    {len(others) - OTHERS} more processes: not shown")
        failure = WorkerFailure("\n".join(lines), restartable=not actionable)
        failure.__cause__ = self.cause
        return failure


TAIL_BYTES = 65536
"""How much of a log is read for its last lines."""


def log_header(pid: int) -> str:
    """The first line that a process writes to its log, which may hold those of earlier starts."""
    return f"── process {pid} ──"


def tail(log: Path, pid: int, *, but: str = "", lines: int = LOG_LINES) -> str:
    """The last lines a process wrote to its log, which may be long, or not there.

    Args:
        but: what is left out if the log ends with it.
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES - len(but.encode())))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    own = text.rpartition(log_header(pid))[2].strip().removesuffix(but.rstrip())
    _, crash, dump = own.rpartition("Fatal Python error")
    if crash:  # of a dump of all threads and the names of all extension modules, the thread that crashed
        _, current, stack = dump.partition("Current thread")
        own = f"{crash}{dump.splitlines()[0]}\n{current}{stack.split(chr(10) * 2)[0]}"
    return "\n".join(own.rstrip().splitlines()[-lines:])


def first_failure(records: Iterable[Record]) -> Record | None:
    """Finds where a failure began: the earliest call that did not fail for want of another's result."""
    return min(records, key=lambda record: (record.inputs, record.at), default=None)


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.rstrip().splitlines()]
