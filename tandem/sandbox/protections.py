"""What holds programs on this machine: sandlock (Landlock and seccomp), from whose waiting process each run
is forked, or bubblewrap (namespaces), which starts one for each. Under both, `inside.py` lets a program make
no system calls but those of a list."""

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
END_SECONDS = 10.0  # how long processes that were killed may take to end
ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: of the clock, and of the processor for each of its processes.
        memory_mb: MiB of address space, for each of its processes.
    """

    seconds: float = 10.0
    memory_mb: int = 1024

    @property
    def words(self) -> list[str]:
        """As `inside.py` reads them."""
        return [str(n) for n in (-int(-self.seconds // 1), self.memory_mb << 20, FILE_BYTES, OPEN_FILES)]


@dataclass(frozen=True, slots=True)
class Begun:
    """A run that has begun.

    Attributes:
        stdout, stderr: to read what it writes.
        done: can be read from once its first process has ended.
        end: ends all its processes, if it is told to or any is left, and returns the first one's exit code.
    """

    stdout: int
    stderr: int
    done: int
    end: Callable[[bool], int]


class Bubblewrap:
    """Starts a process under bubblewrap for each run. For root it is one of a user who is nobody else.

    Attributes:
        folder: where the folders of its runs are made; None: where temporary files are.
        alive: whether it can hold a further program of its thread.
    """

    folder: ClassVar[str | None] = None
    alive: ClassVar[bool] = False

    @staticmethod
    def version() -> str | None:
        """Return what is installed of it; None: nothing."""
        return shutil.which("bwrap")

    def begin(self, folder: str, limits: Limits) -> Begun:
        """Begin the program of a folder."""
        box, user = os.path.join(folder, "box"), 0
        options = ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
        if os.geteuid() == 0:  # without a namespace of users, in which root could become no other
            user = 1 << 30 | secrets.randbits(29)
            os.chmod(folder, 0o711)
            os.chown(box, user, user)
            options += [f"--unshare-{each}" for each in ("ipc", "pid", "net", "uts", "cgroup-try")]
            options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            options += ["--unshare-all"]
        for name, value in ENVIRONMENT.items():
            options += ["--setenv", name, value]
        for path in [*_readable(), folder]:
            options += ["--dir", os.path.dirname(path), "--ro-bind", path, path]  # a folder that all may pass
        for path in ("/dev/null", "/dev/urandom", "/dev/zero"):
            options += ["--dev-bind", path, path]
        options += ["--bind", box, box, "--remount-ro", "/", "--chdir", box]
        first, told = os.pipe()
        command = _command(folder, *limits.words, str(2 * PROCESSES), str(user))  # threads too
        process = subprocess.Popen(
            [self.version() or "bwrap", "--info-fd", str(told), *options, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            bufsize=0,
            start_new_session=True,
            pass_fds=[told],
        )
        os.close(told)
        with open(first, encoding="utf-8") as info:
            facts = info.read()
        last = None
        with suppress(ProcessLookupError):  # it has ended
            # The first process of the program's own count: once it has ended, no other writes a file.
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

        return Begun(process.stdout.fileno(), process.stderr.fileno(), done, end)

    def close(self) -> None:
        """End what it has started: nothing is left."""


class Sandlock:
    """A Python that waits under sandlock, from which each run is forked, to be confined further: to a folder
    of its own, and away from the process that it comes from. Where a run meets a limit, or leaves a process
    behind, all end together and the next run has another. It has what `Bubblewrap` has."""

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
            # The system ends it with the thread that started it, which is to be one that stays.
            self._process: Any = _starter(os.getpid()).submit(box.popen, command, **piped).result()
        except BaseException:
            remove_scratch(self._scratch)
            raise

    @property
    def alive(self) -> bool:
        return self._well and not _wait(self._process.stdout.fileno(), 0)  # where it has ended, it says so

    @staticmethod
    def version() -> str | None:
        return metadata.version("sandlock") if find_spec("sandlock") else None

    def begin(self, folder: str, limits: Limits) -> Begun:
        paths = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        for path in paths:
            os.mkfifo(path)
        stdout, stderr = (os.open(path, os.O_RDONLY | os.O_NONBLOCK) for path in paths)
        with suppress(BrokenPipeError):  # it has died, which is read next
            self._process.stdin.write(" ".join([os.path.basename(folder), *limits.words]).encode())
        done = self._process.stdout.fileno()

        def end(at_once: bool) -> int:
            os.close(stdout)
            os.close(stderr)
            code, *left = [b"-9", b"left"] if at_once else os.read(done, 64).split() or [b"", b""]
            self._well = not left
            if left:
                self._process.kill()  # and all of its group
            if not code:
                raise OSError(f"it has ended: {self._process.stderr.read().decode(errors='replace')[-300:]}")
            return int(code)

        return Begun(stdout, stderr, done, end)

    def close(self) -> None:
        with self._process:  # whose end ends it and all of its group
            self._well = False
        remove_scratch(self._scratch)


Protection = Bubblewrap | Sandlock


def _wait(descriptor: int, seconds: float) -> bool:
    """Waits until a descriptor can be read from, also beyond the first 1,024 of them; whether it can."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


@functools.cache
def _starter(_: int) -> ThreadPoolExecutor:
    """The thread of a process that starts what holds programs."""
    return ThreadPoolExecutor(1, "sandbox")


@contextmanager
def holding(kind: Callable[[], Protection]) -> Iterator[Protection]:
    """One of a kind that holds no program now, which is kept for the next one."""
    kept = kept_for(kind, os.getpid())
    held = kept.pop() if kept else None
    if held is not None and not held.alive:  # somebody has killed it
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
def kept_for(_: Callable[[], Protection], process: int) -> list[Protection]:
    """Those of a kind that wait in a process, which ends them at its end."""
    kept: list[Protection] = []

    def close() -> None:
        while kept and os.getpid() == process:  # a fork's are its parent's
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
    """What a Python program reads: the interpreter, the standard library and shared libraries."""
    paths = sysconfig.get_paths()
    wanted = [_python(), paths["stdlib"], paths["platstdlib"], f"{sys.base_exec_prefix}/lib"]
    wanted += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"]
    return list(dict.fromkeys(path for path in wanted if os.path.exists(path)))
