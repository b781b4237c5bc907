"""The server that forks scoring processes, and the keepers, which watch one scoring process each.

A scoring process calls reward functions. The server imports the modules that scoring processes need, and
forks one keeper per scoring process. The keeper forks the scoring process and writes the process's output to
the log. When the scoring process ends or is no longer needed, the keeper kills all processes that the scoring
process started, including daemons. Server and keepers do not run the user's code and have only one thread
each. A process that forks while other threads run may inherit locks and half-changed memory from these
threads.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

from tandem.errors import RewardError
from tandem.lifetime import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    THREADLESS,
    children_of,
    fork_alone,
    prctl,
)
from tandem.rewards.serving import serve

CALL_BYTES = 64 * 2**10  # how many bytes of one call's output are kept
LOG_BYTES = 64 * 2**20  # the largest size of a log
START_SECONDS = 120.0  # the longest time until the server answers
END_SECONDS = 5.0  # how long a keeper tries to end what its process started
NO_MAIN = "import sys; sys.path[:] = {path!r}; from tandem.rewards.forkserver import run; run({end})"

_lock = threading.Lock()
_servers: dict[int, tuple[subprocess.Popen[bytes], socket.socket]] = {}  # by the process that started it


def fork(ends: Sequence[int]) -> None:
    """Ask the server to fork a keeper and its scoring process.

    Args:
        ends: The file descriptors of the socket to the scoring process, of the socket to the keeper, and of
            the log.

    Raises:
        RewardError: The server does not start.
    """
    own = os.getpid()
    with _lock:
        for _ in range(2):
            if own not in _servers or _servers[own][0].poll() is not None:
                _servers[own] = _started()
            process, line = _servers[own]
            try:
                socket.send_fds(line, [b"f"], ends)
                if line.recv(1):
                    return
            except OSError:  # the server is ending or does not answer
                pass
            line.close()
            process.kill()
            process.wait(END_SECONDS)
    raise RewardError("the server of scoring processes does not start", got="its error messages are above")


def _started() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", NO_MAIN.format(path=sys.path, end=theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | THREADLESS,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    ours.settimeout(START_SECONDS)
    return process, ours


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _reaped() -> Iterator[tuple[int, int]]:
    """Yield (process id, exit code) for each child process that has ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def _end_below(seconds: float) -> dict[int, int]:
    """Stop all descendants of this process, including adopted orphans; return a dict from id to exit code."""
    until, codes = time.monotonic() + seconds, dict[int, int]()
    while time.monotonic() < until:
        codes.update(_reaped())
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            break
        _kill(children_of(os.getpid()))
        time.sleep(0.001)
    return codes


def _waker() -> socket.socket:
    """Return a socket that becomes readable when a child process ends."""
    reads, wakes = socket.socketpair()
    for end in (reads, wakes):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.detach(), warn_on_full_buffer=False)
    return reads


def _child(run: Callable[[], None]) -> NoReturn:
    """Run a function in a newly forked process, then end the process."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


def run(end: int) -> NoReturn:
    """Serve requests until the other end of the socket closes."""
    line = socket.socket(fileno=end)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    gc.collect()
    gc.freeze()
    woken, keepers = _waker(), set[int]()
    while True:
        ready = wait([line, woken])
        if woken in ready:
            woken.recv(4096)
            keepers.difference_update([pid for pid, _ in _reaped()])
            # The rest belonged to a keeper that was killed.
            _kill([pid for pid in children_of(os.getpid()) if pid not in keepers])
        if line in ready:
            try:
                message, ends, _, _ = socket.recv_fds(line, 1, 3)
            except ConnectionResetError:  # the other process ended before it read the reply
                break
            if not message:
                break
            with suppress(OSError):  # the other process has ended
                line.send(b"f")  # before the fork: if the server dies earlier, the request is repeated
            keeper = fork_alone()
            if not keeper:
                line.close()
                woken.close()
                _child(partial(_keep, *ends))
            keepers.add(keeper)
            for each in ends:
                os.close(each)
    until = time.monotonic() + END_SECONDS
    while keepers and time.monotonic() < until:
        keepers.difference_update([pid for pid, _ in _reaped()])
        time.sleep(0.01)
    _end_below(END_SECONDS)
    os._exit(0)


class Printed:
    """Writes a scoring process's output to the log, up to a limit per call and a limit for the log.

    Args:
        log: The file descriptor of the log.
        calls: Memory shared with the process, whose content changes with each call.
    """

    def __init__(self, log: int, calls: mmap.mmap) -> None:
        self._log, self._calls = log, calls
        self._call, self._left, self._dropped = b"", CALL_BYTES, 0

    def take(self, text: bytes) -> None:
        """Write as many bytes as the limits allow, and count the dropped bytes."""
        call = self._calls[:]
        if call != self._call:
            self.tell()
            self._call, self._left = call, CALL_BYTES
        room = min(self._left, max(0, LOG_BYTES - os.fstat(self._log).st_size))
        self._left -= len(text[:room])
        self._dropped += len(text) - self._write(text[:room])

    def tell(self) -> None:
        """Write the number of bytes dropped since the last report to the log, unless the log is full."""
        if self._dropped and os.fstat(self._log).st_size <= LOG_BYTES:
            full = os.fstat(self._log).st_size == LOG_BYTES
            limit = (
                f"the log holds {LOG_BYTES >> 20} MiB"
                if full
                else f"only {CALL_BYTES >> 10} KiB of a call are kept"
            )
            self._write(f"\n[{self._dropped} more bytes were printed and dropped: {limit}]\n".encode())
        self._dropped = 0

    def _write(self, text: bytes) -> int:
        with suppress(OSError):  # a full disk must not end the run
            return os.write(self._log, text) if text else 0
        return 0


def _keep(line: int, control: int, log: int) -> None:
    """Watch a scoring process until the process ends or the other end of `control` closes."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for stream in (1, 2):
        os.dup2(log, stream)
    calls = mmap.mmap(-1, 8)
    reads, writes = os.pipe()
    process = fork_alone()
    if not process:
        _child(partial(_begin, line, writes, calls))
    os.close(line)
    os.close(writes)
    printed, woken = Printed(log, calls), _waker()
    codes, sources = dict[int, int](), [control, woken.fileno(), reads]
    while process not in codes:
        ready = wait(sources, 0 if codes else None)
        if reads in ready and not _pass_on(reads, printed):
            sources.remove(reads)
        if control in ready:
            break
        codes.update(_reaped())  # the process may have ended before the waker existed
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    codes = _end_below(END_SECONDS) | codes
    os.set_blocking(reads, False)
    with suppress(BlockingIOError):
        while _pass_on(reads, printed):
            continue
    printed.tell()
    with suppress(OSError):
        os.write(control, str(codes.get(process, -signal.SIGKILL)).encode())


def _pass_on(reads: int, printed: Printed) -> bool:
    """Copy some output of a process to the log; return False at the end of the output."""
    text = os.read(reads, 1 << 16)
    if text:
        printed.take(text)
    return bool(text)


def _begin(line: int, writes: int, calls: mmap.mmap) -> None:
    """Run this process as a scoring process, with only its socket and standard streams open."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # If memory runs out, the system ends this process first.
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for own, stream in enumerate((os.open(os.devnull, os.O_RDONLY), writes, writes)):
        os.dup2(stream, own)
    kept = os.dup2(line, 3, inheritable=False)
    os.closerange(kept + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    serve(socket.socket(fileno=kept), calls)
