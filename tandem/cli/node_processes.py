"""Processes that a launcher starts, signals that it passes on, and an end that leaves nothing behind."""

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
STOP_S = 10.0  # for the orderly end of what was started here
LEFT_S = 3.0  # for that of what it left behind, before a kill


class Processes:
    """A context in which signals are collected, and at whose end all that was started has ended.

    For a launcher with nothing else to do: every process below this one is taken for its work, and ended.

    Attributes:
        received: signals not yet dealt with, oldest first.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if sys.platform != "linux":
            raise TandemError("clusters of several machines need Linux")
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # what outlives its parent becomes ours, so that we can end it
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
        """Starts a process in a group of its own, so that a terminal's Ctrl-C reaches it once, through us.

        Raises:
            TandemError: there is no such program.
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
        """Sleeps; a signal, or the end of a child, ends the sleep at once."""
        if wait([self._awake], seconds):
            numbers = map(signal.Signals, os.read(self._awake, 512))
            self.received += [number for number in numbers if number != signal.SIGCHLD]
        self._put_to_rest()

    def pass_on(self, child: subprocess.Popen[bytes]) -> None:
        """Gives the signals received so far to the child and its group, as a terminal would."""
        for number in self.received:
            self._tell(child, number)
        self.received.clear()

    def end(self) -> None:
        """Asks all to end, first what was started here, then what it left; kills what does not."""
        for child in self._children:
            self._tell(child, signal.SIGTERM)
        _await(lambda: all(child.poll() is not None for child in self._children), STOP_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self._left():
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(pid, number)
            if _await(lambda: not self._left(), LEFT_S):
                return

    @staticmethod
    def _tell(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
        """Give a signal to a child that lives, and to its group."""
        if child.poll() is None:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.killpg(child.pid, number)

    def _put_to_rest(self) -> None:
        """Takes note of the children that have ended, those too that became ours when their parent ended."""
        known = {child.pid: child for child in self._children}
        with suppress(ChildProcessError):  # no child is left
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in known:
                    known[ended.si_pid].wait()
                else:
                    os.waitpid(ended.si_pid, 0)

    def _left(self) -> list[int]:
        """The processes below this one, until they are put to rest."""
        self._put_to_rest()
        return trees([os.getpid()])[1:]


def _await(condition: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
