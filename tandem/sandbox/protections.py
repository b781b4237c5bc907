"""The two sandboxes that run programs on this machine: sandlock and bubblewrap.

With sandlock (Landlock and seccomp), a waiting process forks a new process for each run. With bubblewrap
(namespaces), each run starts a new bubblewrap process. In both, `inside.py` lets a program make only the
system calls of a list.
"""

from __future__ import annotations

import atexit
import functools
import os
import secrets
import select
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from tandem.lifetime import make_scratch, remove_scratch
from tandem.texts import parse_json

PROCESSES, OPEN_FILES, FILE_BYTES = 8, 64, 16 << 20
FOLDER_BYTES, FOLDER_ENTRIES = 64 << 20, 1000
END_SECONDS = 10.0  # how long killed processes may take to end
ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a program.

    Attributes:
        seconds: limit of the running time, and of the CPU time of each process.
        memory_mb: address space of each process, in MiB.
    """

    seconds: float = 10.0
    memory_mb: int = 1024

    @property
    def arguments(self) -> list[str]:
        """The limits as command-line arguments of `inside.py`."""
        return [str(n) for n in (-int(-self.seconds // 1), self.memory_mb << 20, FILE_BYTES, OPEN_FILES)]


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run that has started.

    Attributes:
        stdout: file descriptor of the program's standard output.
        stderr: file descriptor of the program's standard error.
        done: file descriptor that becomes readable when the first process has ended.
        end: a function that returns the exit code of the first process. It kills all processes of the run if
            its argument is true or if processes are left.
    """

    stdout: int
    stderr: int
    done: int
    end: Callable[[bool], int]


class Bubblewrap:
    """A sandbox that starts a bubblewrap process for each run.

    If this process runs as root, the program runs under a user ID that no other process uses.

    Attributes:
        folder: the parent folder of the runs' folders; None: the folder for temporary files.
        alive: whether the sandbox can run another program.
    """

    folder: ClassVar[str | None] = None
    alive: ClassVar[bool] = False

    @staticmethod
    def version() -> str | None:
        """Return the path of the installed program; None if it is not installed."""
        return shutil.which("bwrap")

    def begin(self, folder: str, limits: Limits) -> StartedRun:
        """Start the program of a folder."""
        box, user = os.path.join(folder, "box"), 0
        options = ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
        if os.geteuid() == 0:  # no user namespace, because root could not switch to another user in it
            user = 1 << 30 | secrets.randbits(29)
            os.chmod(folder, 0o711)
            os.chown(box, user, user)
            options += [f"--unshare-{each}" for each in ("ipc", "pid", "net", "uts", "cgroup-try")]
            options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            options += ["--unshare-all"]
        for name, value in ENVIRONMENT.items():
            options += ["--setenv", name, value]
        for path in [*_readable(), folder]:  # --dir makes parents that any user may traverse
            options += ["--dir", os.path.dirname(path), "--ro-bind", path, path]
        for path in ("/dev/null", "/dev/urandom", "/dev/zero"):
            options += ["--dev-bind", path, path]
        options += ["--bind", box, box, "--remount-ro", "/", "--chdir", box]
        info_read, info_write = os.pipe()
        # The process limit counts threads too, so it is doubled.
        command = _command(folder, *limits.arguments, str(2 * PROCESSES), str(user))
        process = subprocess.Popen(
            [self.version() or "bwrap", "--info-fd", str(info_write), *options, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            bufsize=0,
            start_new_session=True,
            pass_fds=[info_write],
        )
        os.close(info_write)
        with open(info_read, encoding="utf-8") as info:
            facts = info.read()
        last = None
        with suppress(ProcessLookupError):  # the process has ended
            # The first process in the PID namespace: when it has ended, no process of the run is left.
            last = os.pidfd_open(parse_json(facts)["child-pid"]) if facts else None
        done = os.pidfd_open(process.pid)
        assert process.stdout is not None and process.stderr is not None

        def end(_: bool) -> int:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            with process:
                code = process.wait()
            if last is not None:
                _wait(last, END_SECONDS)
            for descriptor in filter(None, (last, done)):
                os.close(descriptor)
            return code

        return StartedRun(process.stdout.fileno(), process.stderr.fileno(), done, end)

    def close(self) -> None:
        """Do nothing, because no process is left after a run."""


class Sandlock:
    """A sandbox with a waiting Python process under sandlock, from which each run is forked.

    A run has more restrictions than the waiting process: it can write only to its folder, and cannot send
    signals to the waiting process. If a run exceeds a limit or leaves a process behind, all processes are
    killed, and the next run gets a new waiting process. The class has the methods of `Bubblewrap`.
    """

    def __init__(self) -> None:
        library = import_module("sandlock")
        self._scratch = make_scratch("sandbox")
        self.folder = str(self._scratch)
        box = library.Sandbox(
            fs_readable=[*_readable(), self.folder, "/dev/urandom", "/dev/zero"],
            fs_writable=[self.folder, "/dev/null"],
            clean_env=True,
            env=ENVIRONMENT,
            max_processes=PROCESSES + 1,
        )
        piped = dict.fromkeys(("stdin", "stdout", "stderr"), library.StdioMode.PIPED)
        self._well, command = True, _command(self.folder)
        try:
            # The kernel kills the process when the thread that started it ends, so use a thread that stays.
            self._process: Any = _starter(os.getpid()).submit(box.popen, command, **piped).result()
        except BaseException:
            remove_scratch(self._scratch)
            raise

    @property
    def alive(self) -> bool:
        # If standard output is readable without a run, the process has ended.
        return self._well and not _wait(self._process.stdout.fileno(), 0)

    @staticmethod
    def version() -> str | None:
        return metadata.version("sandlock") if find_spec("sandlock") else None

    def begin(self, folder: str, limits: Limits) -> StartedRun:
        paths = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        for path in paths:
            os.mkfifo(path)
        stdout, stderr = (os.open(path, os.O_RDONLY | os.O_NONBLOCK) for path in paths)
        with suppress(BrokenPipeError):  # the process has ended; `end` reports this
            self._process.stdin.write(" ".join([os.path.basename(folder), *limits.arguments]).encode())
        done = self._process.stdout.fileno()

        def end(at_once: bool) -> int:
            os.close(stdout)
            os.close(stderr)
            code, *left = [b"-9", b"left"] if at_once else os.read(done, 64).split() or [b"", b""]
            self._well = not left
            if left:
                self._process.kill()  # kills its whole process group
            if not code:
                raise OSError(f"process ended: {self._process.stderr.read().decode(errors='replace')[-300:]}")
            return int(code)

        return StartedRun(stdout, stderr, done, end)

    def close(self) -> None:
        with self._process:  # leaving the block ends its whole process group
            self._well = False
        remove_scratch(self._scratch)


Protection = Bubblewrap | Sandlock


def _wait(descriptor: int, seconds: float) -> bool:
    """Wait until a descriptor is readable; return False after `seconds` seconds.

    Unlike select(), this also works for descriptors above 1023.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


@functools.cache
def _starter(_: int) -> ThreadPoolExecutor:
    """Return the thread of this process that starts sandboxes."""
    return ThreadPoolExecutor(1, "sandbox")


@contextmanager
def idle_sandbox(kind: Callable[[], Protection]) -> Iterator[Protection]:
    """Yield an idle sandbox of a class, or a new sandbox, and keep it for the next program."""
    kept = idle_sandboxes(kind, os.getpid())
    held = kept.pop() if kept else None
    if held is not None and not held.alive:  # its process was killed from outside
        held.close()
        held = None
    held = held or kind()
    try:
        yield held
    finally:
        if held.alive:
            kept.append(held)
        else:
            held.close()


@functools.cache
def idle_sandboxes(_: Callable[[], Protection], process: int) -> list[Protection]:
    """Return the idle sandboxes of a class in this process, which are closed when the process exits."""
    kept: list[Protection] = []

    def close() -> None:
        while kept and os.getpid() == process:  # in a forked process, they belong to the parent
            kept.pop().close()

    atexit.register(close)
    return kept


def _command(*arguments: str) -> list[str]:
    inside = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
    return [_python(), "-P", "-s", "-S", "-B", "-c", inside, *arguments]


def _python() -> str:
    return os.path.realpath(sys.executable)


@functools.cache
def _readable() -> list[str]:
    """Return the paths that a Python program reads: interpreter, standard library and shared libraries."""
    paths = sysconfig.get_paths()
    wanted = [_python(), paths["stdlib"], paths["platstdlib"], f"{sys.base_exec_prefix}/lib"]
    wanted += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"]
    return list(dict.fromkeys(path for path in wanted if os.path.exists(path)))
