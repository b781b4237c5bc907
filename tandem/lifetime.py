"""The ends of processes: what they leave behind, and processes that end with the one that started them."""

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
"""Variables under which pyarrow, NumPy and PyTorch start no thread when they are imported."""

_PREFIX = "tandem-scratch-"
_LAST_WORDS_S = 0.7
"""How long the last words of a process may take."""

_MADE: dict[Path, int] = {}
"""The temporary folders of this process, each with a descriptor that holds its lock."""

last_words: list[Callable[[], object]] = []
"""What `end_now` calls, the last one first: each writes down that this process ends, or gives back what it
holds."""

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


def children_of(pid: int) -> list[int]:
    """Return the processes whose parent is this one. Linux only."""
    found: list[int] = []
    if lists := list(Path(f"/proc/{pid}/task").glob("*/children")):
        for each in lists:
            with suppress(OSError):  # a thread that has ended
                found.extend(map(int, each.read_text(encoding="ascii").split()))
        return found
    for stat in Path("/proc").glob("[0-9]*/stat"):  # a kernel without these lists
        with suppress(OSError, ValueError):  # a process that has ended
            if int(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def trees(roots: Iterable[int]) -> list[int]:
    """Return processes, and after them all that they have started, as far as it is still below them."""
    found = list(roots)
    for pid in found:  # grows meanwhile
        found.extend(children_of(pid))
    return found


def kill_trees(roots: Iterable[int]) -> None:
    """Kill processes and all that is below them."""
    for pid in trees(roots):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


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


def end_now(status: int) -> NoReturn:
    """End this process at once, after its last words. One that hangs or fails does not keep it alive."""
    limit = Timer(_LAST_WORDS_S, os._exit, (status,))
    limit.daemon = True
    limit.start()
    for word in reversed(list(last_words)):
        with suppress(Exception):
            word()
    os._exit(status)


@contextmanager
def scratch_folder(purpose: str, place: Path | None = None) -> Iterator[Path]:
    """A temporary folder for the block; see `make_scratch`."""
    folder = make_scratch(purpose, place)
    try:
        yield folder
    finally:
        remove_scratch(folder)


def make_scratch(purpose: str, place: Path | None = None) -> Path:
    """Make a temporary folder, and remove those that killed processes of this user left beside it.

    The folder is locked as long as this process lives, so that a living owner's folder is known from a dead
    one's, also in another container.

    Args:
        purpose: a word for the folder's name.
        place: the folder it is made in; None: the system's folder for temporary files.
    """
    _claim_pymp()
    return _make_scratch(purpose, Path(tempfile.gettempdir()) if place is None else place)


def remove_scratch(folder: Path) -> None:
    """Remove a folder that `make_scratch` made. What a process still writes there, the next start removes."""
    shutil.rmtree(folder, ignore_errors=True)
    held = _MADE.pop(folder, None)
    if held is not None:
        os.close(held)


@cache
def _claim_pymp() -> None:
    """Give Python's multiprocessing a folder that the next start can remove; its own, `pymp-…`, tells nobody
    whose it is."""
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
        except FileNotFoundError:  # another process took it for one that was left, before it was locked
            continue
        with suppress(OSError):  # a file system without locks: nobody else gets one there either
            fcntl.flock(held, fcntl.LOCK_EX)
        if folder.exists():
            _MADE[folder] = held
            return folder
        os.close(held)  # it was removed in between


def _remove_left(folder: Path) -> None:
    """Remove the temporary folder of a process that has ended; leave a living one's, and another user's."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # no folder, not ours to read, or gone
        return
    try:
        if os.fstat(held).st_uid == os.getuid():
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # its owner lives, or the file system has no locks
        return
    finally:
        os.close(held)


def _remove_all() -> None:
    for folder in list(_MADE):
        remove_scratch(folder)


atexit.register(_remove_all)
last_words.append(_remove_all)
os.register_at_fork(after_in_child=_MADE.clear)
