"""Clean up when processes end, and start child processes that end together with their parent."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import multiprocessing.process
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from threading import Thread, Timer
from typing import Any, NoReturn

PR_SET_CHILD_SUBREAPER = 36
PR_SET_PDEATHSIG = 1

THREADLESS = {
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Environment variables that stop pyarrow, NumPy and PyTorch from starting threads on import."""

UNUSED_SECONDS = 30 * 86400
"""The time after which unused entries of a cache are removed."""
_PREFIX = "tandem-scratch-"
_LAST_WORDS_S = 0.7
"""The time limit for all functions in `last_words` together, in seconds."""

_MADE: dict[Path, int] = {}
"""A dict from a temporary folder of this process to the file descriptor of its lock."""

_HELD: dict[Path, int] = {}
"""A dict from a folder that this process holds to the file descriptor of its lock."""

last_words: list[Callable[[], object]] = []
"""The functions that `end_now` calls, in reverse order.

Each function records that this process ends, or releases a resource.
"""

_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here, because a forked child must not load libraries


def prctl(option: int, value: int) -> None:
    """Call Linux's `prctl`.

    Raises:
        OSError: the call fails.
    """
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def threads(pid: int | str = "self") -> int:
    """Return the number of threads of a process. Linux only."""
    return len(os.listdir(f"/proc/{pid}/task"))


def fork_alone() -> int:
    """Fork this process, like `os.fork`. Linux only.

    Raises:
        RuntimeError: this process has several threads. The child would inherit their locks and half-changed
            memory.
    """
    if threads() != 1:
        names = [comm.read_text().strip() for comm in Path("/proc/self/task").glob("*/comm")]
        raise RuntimeError(f"a process that forks must have a single thread; this one has {', '.join(names)}")
    return os.fork()


def children_of(pid: int) -> list[int]:
    """Return the child processes of a process. Linux only."""
    found: list[int] = []
    if lists := list(Path(f"/proc/{pid}/task").glob("*/children")):
        for each in lists:
            with suppress(OSError):  # the thread has ended
                found.extend(map(int, each.read_text(encoding="ascii").split()))
        return found
    for stat in Path("/proc").glob("[0-9]*/stat"):  # this kernel does not have these lists
        with suppress(OSError, ValueError):  # the process has ended
            if int(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def trees(roots: Iterable[int]) -> list[int]:
    """Return processes, followed by all of their descendants."""
    found = list(roots)
    for pid in found:  # the list grows during the loop
        found.extend(children_of(pid))
    return found


def kill_trees(roots: Iterable[int]) -> None:
    """Kill processes and all of their descendants."""
    for pid in trees(roots):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_with_parent(parent: int) -> None:
    """Request a SIGTERM for this process when the thread that started it ends. Linux only.

    A child calls this function before its program starts.

    Args:
        parent: the process id of the parent process.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def start_bound(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that gets SIGTERM when this process ends, even by SIGKILL.

    On other systems than Linux, the process is started normally.

    Args:
        command: the words of the command.
        options: options of `subprocess.Popen`.

    Raises:
        OSError: the program does not exist.
    """
    if sys.platform != "linux":
        return subprocess.Popen(command, **options)
    started: Future[subprocess.Popen[bytes]] = Future()
    Thread(target=_start_and_stay, args=(started, command, options), daemon=True).start()
    return started.result()


def _start_and_stay(
    started: Future[subprocess.Popen[bytes]], command: Sequence[str], options: dict[str, Any]
) -> None:
    """Start the process, and wait until it ends.

    The child gets its signal when the thread that forked it ends. So this thread must live as long as the
    child.
    """
    tied = partial(end_with_parent, os.getpid())
    try:
        process = subprocess.Popen(command, preexec_fn=tied, **options)  # noqa: PLW1509 - it only makes system calls
    except BaseException as error:  # raised in the caller's thread
        started.set_exception(error)
        return
    started.set_result(process)
    with suppress(ChildProcessError):  # the caller has already reaped it
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def end_now(status: int) -> NoReturn:
    """End this process at once, after the functions in `last_words`.

    A function that hangs or fails does not keep the process alive.
    """
    limit = Timer(_LAST_WORDS_S, os._exit, (status,))
    limit.daemon = True
    limit.start()
    for word in reversed(list(last_words)):
        with suppress(Exception):
            word()
    os._exit(status)


@contextmanager
def scratch_folder(purpose: str, place: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder from `make_scratch`, and remove it after the block."""
    folder = make_scratch(purpose, place)
    try:
        yield folder
    finally:
        remove_scratch(folder)


def make_scratch(purpose: str, place: Path | None = None) -> Path:
    """Make a temporary folder, and remove the folders that killed processes of this user left behind.

    The folder is locked as long as this process lives. From the lock, other processes, even in another
    container, know whether the folder's owner lives.

    Args:
        purpose: a word for the folder's name.
        place: the parent folder; None: the system's folder for temporary files.
    """
    _claim_pymp()
    return _make_scratch(purpose, Path(tempfile.gettempdir()) if place is None else place)


def remove_scratch(folder: Path) -> None:
    """Remove a folder that `make_scratch` made.

    If a process still writes to the folder, the next `make_scratch` removes the remaining files.
    """
    shutil.rmtree(folder, ignore_errors=True)
    held = _MADE.pop(folder, None)
    if held is not None:
        os.close(held)


@cache
def _claim_pymp() -> None:
    """Set a scratch folder for Python's multiprocessing, which the next start can remove.

    The default folder, `pymp-…`, does not show which process owns it.
    """
    config = multiprocessing.process.current_process().__dict__["_config"]
    if "tempdir" not in config:
        folder = _make_scratch("pymp", Path(tempfile.gettempdir()))
        config["tempdir"] = str(folder)


def _make_scratch(purpose: str, place: Path) -> Path:
    for left in place.glob(f"{_PREFIX}*"):
        _remove_left(left)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{purpose}-", dir=place))
        try:
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process removed it before it was locked
            continue
        with suppress(OSError):  # a file system without locks: no process can lock there
            fcntl.flock(held, fcntl.LOCK_EX)
        if folder.exists():
            _MADE[folder] = held
            return folder
        os.close(held)  # another process removed it in between


def _remove_left(folder: Path) -> None:
    """Remove a temporary folder, unless its process still lives or belongs to another user."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # not a folder, not readable, or already removed
        return
    try:
        if os.fstat(held).st_uid == os.getuid():
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # its owner lives, or the file system has no locks
        return
    finally:
        os.close(held)


def hold(folder: Path) -> bool:
    """Keep `remove_unused` from removing a folder as long as this process lives.

    Returns:
        Whether the folder exists.
    """
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    before, _HELD[folder] = _HELD.get(folder), held
    if before is not None:
        os.close(before)
    with suppress(OSError):  # a file system that is read-only or has no locks: nothing is removed there
        os.utime(held)
        fcntl.flock(held, fcntl.LOCK_SH)
    return folder.exists()


def remove_unused(place: Path) -> None:
    """Remove the folders in a cache that no process has held for UNUSED_SECONDS."""
    for folder in place.iterdir():
        with suppress(FileNotFoundError):  # another process removed it
            if time.time() - folder.stat().st_mtime > UNUSED_SECONDS:
                _remove_left(folder)


def _remove_all() -> None:
    for folder in list(_MADE):
        remove_scratch(folder)


atexit.register(_remove_all)
last_words.append(_remove_all)
os.register_at_fork(after_in_child=_MADE.clear)
