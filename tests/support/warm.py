"""Python processes that start with PyTorch, Ray and Tandem already imported.

A new process spends about twenty seconds on imports. Here, each test process has one server that imports
everything once and forks itself for each program. A forked process has its own process id, memory, signals
and exit, and every library is fresh as after its import. Some tests start a cold Python instead. They test
what is read at the start of a process (MALLOC_…), the imports themselves, or all processes of a session.
"""

import atexit
import os
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tandem import lifetime
from tests.support import warm_server

START_LIMIT_S = 240.0


@cache
def server() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    atexit.register(folder.cleanup)
    path = Path(folder.name, "socket")
    own = lifetime.THREADLESS | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, warm_server.__file__, path], stdin=subprocess.PIPE, env=os.environ | own
    )
    atexit.register(process.wait)  # exit functions run in reverse order
    atexit.register(process.stdin.close)  # type: ignore[union-attr]
    deadline = time.monotonic() + START_LIMIT_S
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
        time.sleep(0.05)
    return path


class WarmProcess(subprocess.Popen[Any]):
    """A `subprocess.Popen([sys.executable, …])` with streams, `cwd`, `env` and `start_new_session`."""

    def _execute_child(self, args: Any, *more: Any) -> None:
        cwd, env = more[4:6]
        streams, start_new_session = more[9:15], more[20]
        child_ends = [end if end != -1 else own for own, end in enumerate(streams[i] for i in (0, 3, 5))]
        self._line = warm_server.ask(
            server(),
            {
                "words": [str(word) for word in args[1:]],
                "cwd": str(cwd or Path.cwd()),
                "env": {name: str(value) for name, value in (os.environ if env is None else env).items()},
                "session": bool(start_new_session),
            },
            child_ends,
        )
        self._answers = self._line.makefile("r")
        self.pid = int(self._answers.readline())
        self._child_created = True
        self._close_pipe_fds(*streams)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        try:
            self._line.settimeout(0 if wait_flags & os.WNOHANG else None)
            seen = self._line.recv(1, socket.MSG_PEEK)
            self._line.settimeout(None)
        except BlockingIOError:
            return 0, 0
        except OSError:  # the garbage collector closed the line of a process that nobody waits for
            seen = b""
        status = int(self._answers.readline()) if seen else 9  # 9 if the server is gone
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def run(command: list[Any], *, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command like `subprocess.run(…, capture_output=True, text=True, check=False)`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with WarmProcess(command, **(pipes | options)) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def cold(*words: Any, timeout: float = 900, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a process of its own, with Tandem on its path, and return how it ended."""
    env = options.pop("env", os.environ) | {"PYTHONPATH": str(Path(__file__).parents[2])}
    options |= {"capture_output": True, "text": True, "timeout": timeout}
    return subprocess.run([sys.executable, *words], check=False, env=env, **options)


def warm_ray() -> None:
    """Let Ray clusters that this process starts from now on fork their workers from the server."""
    services: Any = import_module("ray._private.services")
    stand_in = server().with_name("python")
    if not stand_in.exists():
        stand_in.write_text(f"#!{sys.executable} -ISs\n{Path(warm_server.__file__).read_text()}")
        stand_in.chmod(0o755)
    services.sys = SimpleNamespace(**(vars(sys) | {"executable": str(stand_in)}))
