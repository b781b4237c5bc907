"""Processes that end with the one that started them, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
PR_SET_PDEATHSIG = 1

THREADLESS = {
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Variables under which pyarrow, NumPy and PyTorch start no thread when they are imported."""

_LIBC = ctypes.CDLL(None, use_errno=True)  # here, for a forked child must not load libraries


def prctl(option: int, value: int) -> None:
    """Linux's system call of that name.

    Raises:
        OSError: it fails.
    """
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def threads(pid: int | str = "self") -> int:
    """Return how many threads a process has. Linux only."""
    return len(os.listdir(f"/proc/{pid}/task"))


def fork_alone() -> int:
    """Fork this process, as `os.fork`. Linux only.

    Raises:
        RuntimeError: it has several threads, whose locks and half-changed memory the child would inherit.
    """
    if threads() != 1:
        names = [comm.read_text().strip() for comm in Path("/proc/self/task").glob("*/comm")]
        raise RuntimeError(f"a process that forks may have one thread, and this one has {', '.join(names)}")
    return os.fork()


def end_with_parent(parent: int) -> None:
    """Called in a child before its program begins: SIGTERM when the thread that started it ends. Linux only.

    Args:
        parent: the process id of that thread.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended before that could be asked for
        os._exit(1)


def start_bound(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a process that gets SIGTERM when this one ends, be it by SIGKILL. Elsewhere than on Linux it is
    started as any other.

    Args:
        options: of `subprocess.Popen`.

    Raises:
        OSError: there is no such program.
    """
    if sys.platform != "linux":
        return subprocess.Popen(command, **options)
    started: Future[subprocess.Popen[bytes]] = Future()
    Thread(target=_start_and_stay, args=(started, command, options), daemon=True).start()
    return started.result()


def _start_and_stay(
    started: Future[subprocess.Popen[bytes]], command: Sequence[str], options: dict[str, Any]
) -> None:
    """The signal comes with the end of the thread that forked, so this one lives as long as the child."""
    tied = partial(end_with_parent, os.getpid())
    try:
        process = subprocess.Popen(command, preexec_fn=tied, **options)  # noqa: PLW1509 - it only makes system calls
    except BaseException as error:  # raised in the caller's thread
        started.set_exception(error)
        return
    started.set_result(process)
    with suppress(ChildProcessError):  # the caller has taken note of its end
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
