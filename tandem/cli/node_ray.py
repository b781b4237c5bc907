"""The Ray node of this machine.

The program `ray` runs as a child of the launcher. The package Ray is not imported.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from tandem.cli.node_file import HeadFile
from tandem.cli.node_processes import Processes
from tandem.errors import TandemError

STARTED = "Ray runtime started"  # `ray start` prints this when its node is up
LAST_LINES = 15


class RayNode:
    """A process of `ray start --block`.

    Args:
        processes: starts and stops the process.
        log: file for the output of Ray.
        words: arguments of `ray start`.

    Raises:
        TandemError: Ray is not installed.
    """

    def __init__(self, processes: Processes, log: IO[bytes], words: Sequence[str]) -> None:
        self._processes = processes
        self._log = log
        self._command = [_program(), "start", "--block", "--log-color=false", *words]

    def start(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._log.truncate(0)
        self._log.seek(0)
        self._process = self._processes.start([*self._command, *words], environment, self._log)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def require(self) -> None:
        """Check that Ray still runs.

        Raises:
            TandemError: Ray has ended.
        """
        if self.ended:
            lines = self.last_lines()
            raise TandemError(
                f"Ray ended on this machine while it was needed; its last lines of output:\n{lines}"
            )

    def is_up(self, deadline: float, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the node is up.

        Args:
            deadline: when to stop waiting, on the clock of time.monotonic.
            given_up: returns True to stop waiting.

        Returns:
            True if the node is up; False if Ray ended, a signal asked to stop, the deadline passed or
            `given_up` returned True.
        """
        while STARTED not in self._printed():
            late = time.monotonic() > deadline or self._processes.stop_asked
            if late or self.ended or given_up():
                return False
            self._processes.pause(0.2)
        return True

    def last_lines(self) -> str:
        lines = [line for line in self._printed().splitlines() if line.strip()]
        return "\n".join(lines[-LAST_LINES:])

    def _printed(self) -> str:
        # pread, because the child writes at a file offset that both processes share
        return os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")


def environment(file: HeadFile, *, locked: bool) -> dict[str, str]:
    """Return the environment variables for processes that connect to the cluster.

    Args:
        file: the file of the cluster's head.
        locked: whether the cluster requires the token next to `file`.
    """
    variables = dict(os.environ)
    variables.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    variables.setdefault(
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0"
    )  # otherwise Ray waits 30 s if the head is gone
    if locked:
        variables.pop("RAY_AUTH_TOKEN", None)  # Ray would prefer it to the file
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file.token_path)}
    else:
        variables.setdefault("RAY_AUTH_MODE", "disabled")
    return variables


def _program() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "ray"
    found = str(beside) if beside.exists() else shutil.which("ray")
    if found is None:
        raise TandemError("Ray is not installed here; install it with `pip install 'tandem[ray]'`")
    return found
