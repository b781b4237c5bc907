"""Processes that end within a time, each with all that it started: new ones, and forks of this one.

A fork begins with this one's imports, which take longer than the smallest work does. It has one thread, and
is for CPUs alone: a device that a process has used cannot be used by its forks.
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
    """The exit status; None where it took longer."""
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
    """The same of a fork of this process that does the work: 0, what it exits with, or 1 where it raises."""
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
    """In the fork: the work, and the end."""
    status = 1
    try:
        os.setsid()
        for number, stream in ((1, stdout), (2, stderr)):
            if stream is not None:
                os.dup2(stream.fileno(), number)
        torch.set_num_threads(1)  # makes the fork's pool of threads, which two threads must not do at once
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
    """What a process printed.

    Args:
        run: starts it with this file for both of its outputs, and gives its status.
        what: is run, for the error.

    Raises:
        RuntimeError: it failed, or took longer; its last words.
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
