"""Failures of workers: records of failed calls, and the report for the user."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tandem.errors import TandemError, WorkerFailure

OTHERS = 16
"""The number of other processes that the report names."""
LOG_LINES = 30
"""The number of last lines of a failed worker's log that the report shows."""


@dataclass(frozen=True, slots=True)
class Place:
    """A process of a pool.

    Attributes:
        pool: The name of the pool.
        rank: The rank of the process in the pool.
        world_size: The number of processes in the pool.
        node: The address of the machine.
        pid: The process id on that machine.
        log: The file with the process's output.
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
    """A call that raised an exception.

    Attributes:
        pool: The pool of the process.
        rank: The rank of the process.
        role: The role of the worker.
        method: The method that was called.
        error: The exception as one line of text.
        trace: The traceback.
        cause: The exception, if it can be pickled.
        inputs: Whether the call failed because an input was missing. In this case, another call failed first.
        at: The time of the failure, in seconds since the epoch on the worker's machine.
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
    """The error that a worker's process sends instead of a result, with the record of the failed call."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self.record = record


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a worker's process, as the process reports it.

    Attributes:
        state: "idle", "waiting for the inputs of" or "running".
        role: The role of the current call.
        method: The method of the current call.
        since_s: Seconds in the current state.
        resident_bytes: The resident memory of the process.
        failures: Calls that raised an exception since the last report.
        messages: Messages for the user since the last report.
    """

    state: str
    role: str
    method: str
    since_s: float
    resident_bytes: int
    failures: tuple[Record, ...] = ()
    messages: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.state == "idle":
            return "idle"
        return f"{self.state} {self.role}.{self.method} for {self.since_s:.1f} s"


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why a run cannot continue: the first failure and its process.

    Attributes:
        place: The failed process.
        what: A description of the failure, in one sentence.
        role: The role of the call that was running, if known.
        method: The method of the call that was running, if known.
        detail: The traceback, or the stacks of the process.
        cause: The exception, if there is one.
    """

    place: Place
    what: str
    role: str = ""
    method: str = ""
    detail: str = ""
    cause: BaseException | None = None

    def report(self, others: Mapping[Place, str]) -> WorkerFailure:
        """Return the error for the user.

        Args:
            others: The activity of every other process.
        """
        actionable = isinstance(self.cause, TandemError)
        rank = f"{self.role or self.place.pool} rank {self.place.rank} of {self.place.world_size}"
        lines = [
            f"{rank} failed{f' in {self.method}' if self.method else ''}: {self.what}",
            f"  where:    pool {self.place.pool}, node {self.place.node}, pid {self.place.pid}",
        ]
        if self.detail:
            lines += ["  stack:", *_indented(self.detail)]
        lines += [
            f"  end of the log {self.place.log}:",
            *_indented(tail(self.place.log, self.place.pid, without=self.detail) or "(empty)"),
        ]
        if others:
            shown = list(others.items())[:OTHERS]
            lines += ["  other processes:", *(f"    {place}: {doing}" for place, doing in shown)]
        if len(others) > OTHERS:
            lines.append(f"    and {len(others) - OTHERS} more processes")
        failure = WorkerFailure("\n".join(lines), restartable=not actionable)
        failure.__cause__ = self.cause
        return failure


TAIL_BYTES = 65536
"""The number of bytes at the end of a log that are read to find the log's last lines."""


def log_header(pid: int) -> str:
    """Return the first line that a process writes to its log.

    The header is needed because the log may also contain the output of earlier processes.
    """
    return f"── process {pid} ──"


def tail(log: Path, pid: int, *, without: str = "", lines: int = LOG_LINES) -> str:
    """Return the last lines that a process wrote to its log.

    The log may be long or missing.

    Args:
        log: The log file.
        pid: The process id.
        without: A text to leave out if the log ends with it.
        lines: The number of lines.
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES - len(without.encode())))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    own = text.rpartition(log_header(pid))[2].strip().removesuffix(without.rstrip())
    _, crash, dump = own.rpartition("Fatal Python error")
    if crash:  # the dump lists all threads and extension modules; keep only the thread that crashed
        _, current, stack = dump.partition("Current thread")
        own = f"{crash}{dump.splitlines()[0]}\n{current}{stack.split(chr(10) * 2)[0]}"
    return "\n".join(own.rstrip().splitlines()[-lines:])


def first_failure(records: Iterable[Record]) -> Record | None:
    """Return the record of the earliest failure; None without records.

    This is the earliest call that did not fail because an input was missing.
    """
    return min(records, key=lambda record: (record.inputs, record.at), default=None)


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.rstrip().splitlines()]
