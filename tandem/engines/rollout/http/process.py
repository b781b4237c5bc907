"""A server that is started here and ends with this process."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tandem.errors import EngineError
from tandem.lifetime import start_bound

_TAIL_BYTES = 2000
_ENDING_S = 20.0
_HEALTH_S = 5.0
_PAUSE_S = 0.2
_PLACE = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_DIRECT = urllib.request.build_opener(
    urllib.request.ProxyHandler({})
)  # a proxy cannot reach this machine's server


def server_log(program: str, log_file: Path | None, say: Callable[[str], None] | None) -> Path:
    """Return the file for a server's output, and report it. Without `log_file`, create a temporary folder."""
    output = log_file or Path(tempfile.mkdtemp(prefix=f"tandem-{program.lower()}-")) / "server.log"
    if say is not None:
        say(f"{program}'s server writes its log to {output}")
    return output


class ServerProcess:
    """A server that runs until `close` is called, and no longer than this process.

    Args:
        name: The server's name in messages, such as "vLLM's server".
        command: The command that starts the server.
        url: The server's URL.
        log: The file for everything that it prints.
        environment: Variables added to this process's environment.
        start_timeout_s: The time limit until the server answers.
        keeps_log: Whether the log stays. If not, `close` removes its folder, unless the server failed.

    Raises:
        EngineError: The server ended, or did not answer in time. The message contains the end of its log.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        url: str,
        log: Path,
        *,
        environment: Mapping[str, str],
        start_timeout_s: float,
        keeps_log: bool = True,
    ) -> None:
        self.name = name
        self.url = url
        self.log = log
        self._keeps_log = True
        self._ended = False
        with log.open("ab") as out:
            self._process = start_bound(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**_own_environment(), **environment},
                start_new_session=True,  # so that `close` can end the server's own processes too
            )
        try:
            self._wait(start_timeout_s)
        except BaseException:
            self.close()
            raise
        self._keeps_log = keeps_log

    def _wait(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while True:
            self.check()
            try:
                with _DIRECT.open(f"{self.url}/health", timeout=_HEALTH_S):
                    return
            except OSError:
                if time.monotonic() > until:
                    raise self._failure(f"{self.name} did not answer within {timeout_s:g} s") from None
                time.sleep(_PAUSE_S)

    def check(self, *, within_s: float = 0.0) -> None:
        """Check that the server runs.

        Args:
            within_s: How long to wait for the server's end.

        Raises:
            EngineError: The server has ended, or ended during the wait.
        """
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(within_s)
            raise self._failure(f"{self.name} ended with status {status}")

    def _failure(self, message: str) -> EngineError:
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = file.read().decode(errors="replace")
        return EngineError(message, got=f"{self.log}: …{tail}", remedy="check the server's log")

    def close(self) -> None:
        """Stop the server and all processes that it started. Further calls do nothing."""
        if self._ended:
            return
        self._ended = True
        works = self._process.poll() is None
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, sign)
                self._process.wait(_ENDING_S)
        if works and not self._keeps_log:
            shutil.rmtree(self.log.parent)


def _own_environment() -> dict[str, str]:
    """Return this process's environment without its place among the workers, which the server would take."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _PLACE and not name.startswith("TORCHELASTIC_")
    }


def free_port() -> int:
    """Return a port of this machine that no program uses now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def options_of(arguments: Mapping[str, object]) -> list[str]:
    """Return arguments as options of a command line.

    True and False become `--name` and `--no-name`. An argument that is None is left out.
    """
    options: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            options += [f"--{option}", str(value)]
    return options
