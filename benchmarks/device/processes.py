"""Run processes with a time limit, and end them with all processes that they started.

A process is either new or a fork of the current process. A fork already has the imports, which take longer
than the smallest work. It has one thread and works only on CPUs, because a fork cannot use a device that its
parent has used.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.device.report import short

ROOT = Path(__file__).resolve().parents[2]


def run_command(command: Sequence[str], limit_s: float, **streams: IO[Any]) -> int | None:
    """Run a command; return its exit status, or None if it took longer than the limit."""
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_group(process.pid)
        process.wait()


def run_forked(
    work: Callable[[], object],
    limit_s: float,
    *,
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None,
) -> int | None:
    """Do the work in a fork of this process, and return its exit status.

    Returns:
        0 if the work returns, its exit code if it exits, 1 if it raises, None after the time limit.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        _become(work, stdout, stderr)
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None
    finally:
        _end_group(process)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)


def _become(work: Callable[[], object], stdout: IO[Any] | None, stderr: IO[Any] | None) -> None:
    """Do the work in the fork, and end the fork."""
    status = 1
    try:
        os.setsid()
        for number, stream in ((1, stdout), (2, stderr)):
            if stream is not None:
                os.dup2(stream.fileno(), number)
        # this creates the fork's thread pool, which two threads must not do at the same time
        torch.set_num_threads(1)
        work()
        status = 0
    except SystemExit as asked:
        status = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def printed_by(run: Callable[[IO[Any]], int | None], what: str, limit_s: float) -> str:
    """Run a process and return its output.

    Args:
        run: starts the process with this file for stdout and stderr, and returns its status.
        what: the name of the process for the error message.
        limit_s: the time limit in seconds, for the error message.

    Raises:
        RuntimeError: the process failed or took too long; the message has the end of the output.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        status = run(said)
        said.seek(0)
        text = said.read()
    print(short(text, 20000), file=sys.stderr)
    if status != 0:
        ended = f"ran longer than {limit_s:.0f} s" if status is None else f"ended with {status}"
        raise RuntimeError(f"{what} {ended}:\n{short(text, 2500)}")
    return text
