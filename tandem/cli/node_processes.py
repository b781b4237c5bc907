"""The child processes of a launcher, which starts them, forwards signals and stops all of them at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from typing import IO, Any, Self

from tandem.errors import TandemError
from tandem.lifetime import PR_SET_CHILD_SUBREAPER, end_with_parent, prctl, trees

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STOPS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
STOP_S = 10.0  # time for the children to end
LEFT_S = 3.0  # time for the remaining descendants to end, before they are killed


class Processes:
    """A context that collects signals. At its end, every process that was started in it is stopped.

    Use this class only in a launcher: the class stops every descendant of this process.

    Attributes:
        received: signals that are not handled yet, oldest first.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if sys.platform != "linux":
            raise TandemError("clusters of several machines need Linux")
        prctl(
            PR_SET_CHILD_SUBREAPER, 1
        )  # orphaned descendants become children of this process, which can then end them
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._wakeup_before = signal.set_wakeup_fd(self._wake)
        for number in (*PASSED_ON, signal.SIGCHLD):
            self._before[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        prctl(PR_SET_CHILD_SUBREAPER, 0)
        os.close(self._awake)
        os.close(self._wake)

    @property
    def stop_asked(self) -> bool:
        return bool(STOPS.intersection(self.received))

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process in its own process group.

        A Ctrl-C in the terminal then reaches the child only once, through this process.

        Args:
            command: the words of the command.
            environment: the whole environment of the process.
            output: file for the standard output and standard error of the process; None: the streams of this
                process.

        Raises:
            TandemError: the program does not exist.
        """
        try:
            child = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                process_group=0,
                preexec_fn=partial(end_with_parent, os.getpid()),  # noqa: PLW1509 - the launcher has one thread
            )
        except OSError as error:
            raise TandemError(f"{command[0]!r} cannot be run ({error.strerror})") from error
        self._children.append(child)
        return child

    def pause(self, seconds: float) -> None:
        """Sleep until the time is over, a signal arrives or a child ends."""
        if wait([self._awake], seconds):
            numbers = map(signal.Signals, os.read(self._awake, 512))
            self.received += [number for number in numbers if number != signal.SIGCHLD]
        self._reap()

    def pass_on(self, child: subprocess.Popen[bytes]) -> None:
        """Send the signals that were received to the child and its process group, as a terminal would."""
        for number in self.received:
            self._signal(child, number)
        self.received.clear()

    def end(self) -> None:
        """Send SIGTERM to all children, then to all descendants, and kill the remaining processes."""
        for child in self._children:
            self._signal(child, signal.SIGTERM)
        _await(lambda: all(child.poll() is not None for child in self._children), STOP_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self._descendants():
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, number)
            if _await(lambda: not self._descendants(), LEFT_S):
                return

    @staticmethod
    def _signal(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
        """Send a signal to a living child and its process group."""
        if child.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(child.pid, number)

    def _reap(self) -> None:
        """Reap the children that have ended, including descendants that became children of this process."""
        known = {child.pid: child for child in self._children}
        with suppress(ChildProcessError):  # there are no children
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in known:
                    known[ended.si_pid].wait()
                else:
                    os.waitpid(ended.si_pid, 0)

    def _descendants(self) -> list[int]:
        """Return the ids of all living descendants of this process."""
        self._reap()
        return trees([os.getpid()])[1:]


def _await(condition: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
