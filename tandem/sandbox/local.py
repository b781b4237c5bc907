"""Programs run on this machine, each in a sandbox of its own: sandlock (Landlock and seccomp), else
bubblewrap (namespaces), with what neither holds mended by `inside.py`.

A program has no network and none of the parent's environment, reads the Python installation alone, and writes
in a folder of its own that is watched and removed. It ends as one group of processes.
"""

from __future__ import annotations

import functools
import os
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from tandem.errors import RewardError

Status = Literal["finished", "error", "timeout", "output", "disk"]
PROCESSES, OPEN_FILES, FILE_BYTES = 8, 64, 16 << 20
FOLDER_BYTES, FOLDER_ENTRIES = 64 << 20, 1000
OUTPUT_BYTES = 4 << 20
WATCH_SECONDS = 0.05
"""How often a program's folder is measured."""
ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
CPU_TIME_SIGNALS = (-24, 152)
DENIED = """
    chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes utimensat futimesat
    setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr
    setpriority sched_setscheduler sched_setattr sched_setparam sched_setaffinity ioprio_set
    move_pages migrate_pages process_madvise kcmp
    clock_settime settimeofday adjtimex clock_adjtime chroot memfd_create
    fallocate unlink unlinkat rename renameat renameat2
"""
"""What Landlock lets through: changes to files outside by their owner, priorities, the clock, memory that no
limit counts, and files whose name is gone, which nobody could see grow."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: of the clock, and of the processor for each of its processes.
        memory_mb: MiB of address space, for each of its processes.
    """

    seconds: float = 10.0
    memory_mb: int = 1024


@dataclass(frozen=True, slots=True)
class Run:
    """What a program did.

    Attributes:
        status: "finished" with exit status 0; "error" with another, or by a signal; else the limit it met.
        stdout, stderr: what it wrote; more than 4 MiB end it.
    """

    status: Status
    stdout: str = ""
    stderr: str = ""


Start = Callable[[Sequence[str], str, Limits], Any]
"""Starts a command in a sandbox; returns its process, like that of `subprocess`."""


def protection() -> str:
    """The name and version of what holds the programs on this machine.

    Raises:
        RewardError: nothing does; says why not, and what to install.
    """
    return _found()[0]


def run(program: str, stdin: str, limits: Limits, start: Start | None = None) -> Run:
    """Runs a Python program in a sandbox.

    Args:
        start: the sandbox; None: the one that `protection` names.

    Raises:
        RewardError: there is none, or it did not start.
    """
    start = start or _found()[1]
    with tempfile.TemporaryDirectory(prefix="tandem-sandbox-", ignore_cleanup_errors=True) as folder:
        for name, text in (("program.py", program), ("stdin.txt", stdin)):
            Path(folder, name).write_bytes(text.encode("utf-8", "replace"))
        box = os.path.join(folder, "box")
        os.mkdir(box)
        try:
            with start(_command(folder, limits, start), folder, limits) as process:
                return _watched(process, box, limits)
        except (OSError, RuntimeError) as error:
            raise RewardError("a sandbox did not start", got=f"{type(error).__name__}: {error}") from error
        finally:
            _remove(box)


def _command(folder: str, limits: Limits, start: Start) -> list[str]:
    most = (-int(-limits.seconds // 1), limits.memory_mb << 20, FILE_BYTES, OPEN_FILES)
    counted = 0 if start is sandlock else 2 * PROCESSES  # threads too
    return [_python(), "-I", "-S", "-B", "-c", _inside(), folder, *map(str, (*most, counted))]


def sandlock(command: Sequence[str], folder: str, limits: Limits) -> Any:
    """Starts a command under sandlock."""
    library = import_module("sandlock")
    box = os.path.join(folder, "box")
    sandbox = library.Sandbox(
        fs_readable=[*_readable(), folder, "/dev/urandom", "/dev/zero"],
        fs_writable=[box, "/dev/null"],
        cwd=box,
        clean_env=True,
        env=ENVIRONMENT,
        max_memory=PROCESSES * limits.memory_mb << 20,
        max_processes=PROCESSES,
        extra_deny_syscalls=DENIED.split(),
        no_coredump=True,
    )
    mode = library.StdioMode
    return sandbox.popen(command, stdin=mode.NULL, stdout=mode.PIPED, stderr=mode.PIPED)


def bubblewrap(command: Sequence[str], folder: str, limits: Limits) -> Any:
    """Starts a command under bubblewrap."""
    options = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        options += ["--setenv", name, value]
    for path in [*_readable(), folder]:
        options += ["--ro-bind", path, path]
    for path in ("/dev/null", "/dev/urandom", "/dev/zero"):
        options += ["--dev-bind", path, path]
    box = ["--size", str(FOLDER_BYTES), "--tmpfs", os.path.join(folder, "box"), "--remount-ro", "/"]
    inside = ["--chdir", os.path.join(folder, "box"), "--", *command]
    return subprocess.Popen(
        [_bwrap() or "bwrap", *options, *box, *inside],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        bufsize=0,
        start_new_session=True,
    )


def _watched(process: Any, box: str, limits: Limits) -> Run:
    """Reads what a program writes until its first process ends or a limit is met, and ends all of it."""
    texts = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    alive, poll = os.pidfd_open(process.pid), select.poll()
    for descriptor in (*texts, alive):
        poll.register(descriptor, select.POLLIN)
    met: Status | None = None
    deadline, watch = time.monotonic() + limits.seconds, 0.0
    try:
        while met is None:
            ready = [descriptor for descriptor, _ in poll.poll(WATCH_SECONDS * 1000)]
            if ready == [alive]:  # all that it wrote has been read
                break
            for descriptor in set(ready) - {alive}:
                read = os.read(descriptor, 1 << 16)
                texts[descriptor] += read
                if not read:
                    poll.unregister(descriptor)
                if len(texts[descriptor]) > OUTPUT_BYTES:
                    met = "output"
            if time.monotonic() > watch:
                met = "disk" if _too_large(box) else met
                watch = time.monotonic() + WATCH_SECONDS
            met = "timeout" if time.monotonic() > deadline else met
    finally:
        os.close(alive)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        ended = process.wait()
    code = ended if isinstance(ended, int) else -ended.signal if ended.signal > 0 else ended.exit_code
    if met is None:
        met = "timeout" if code in CPU_TIME_SIGNALS else "error" if code else "finished"
    stdout, stderr = (bytes(text).decode("utf-8", "replace") for text in texts.values())
    return Run(met, stdout, stderr)


def _too_large(box: str) -> bool:
    """Whether a folder holds too much, or hides what it holds."""
    waiting, entries, size = [box], 0, 0
    while waiting:
        try:
            with os.scandir(waiting.pop()) as found:
                for entry in found:
                    status = entry.stat(follow_symlinks=False)
                    entries, size = entries + 1, size + 512 * status.st_blocks
                    if entries > FOLDER_ENTRIES or size > FOLDER_BYTES:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:
            return True
    return False


def _remove(box: str) -> None:
    """Removes a folder, also one whose folders cannot be read, or are too deep for Python."""
    try:
        shutil.rmtree(box)
    except (OSError, RecursionError):
        subprocess.run(["chmod", "-R", "u+rwX", box], check=False, capture_output=True)
        subprocess.run(["rm", "-rf", "--", box], check=False, capture_output=True)


@functools.cache
def _found() -> tuple[str, Start]:
    problems = []
    for start, there in (
        (sandlock, find_spec("sandlock") is not None),
        (bubblewrap, _bwrap()),
    ):
        if not there:
            problems.append(f"{start.__name__} is not installed")
            continue
        try:
            tried = run("print(6 * 7)", "", Limits(), start)
        except RewardError as error:
            tried = Run("error", stderr=str(error.got))
        if tried == Run("finished", "42\n"):
            version = f" {metadata.version('sandlock')}" if start is sandlock else f" ({_bwrap()})"
            return start.__name__ + version, start
        problems.append(f"{start.__name__} does not work here: {tried.stderr.strip()[-300:] or tried.status}")
    raise RewardError(
        "nothing on this machine keeps a model's programs from harm",
        field="a reward that runs programs",
        got="; ".join(problems),
        expected="sandlock, on Linux 6.12 or newer, or bubblewrap, where user namespaces are allowed",
        remedy="pip install 'tandem[sandbox]', or install bubblewrap, or name a server: reward.sandbox.url",
    )


def _bwrap() -> str | None:
    return shutil.which("bwrap")


@functools.cache
def _inside() -> str:
    return Path(__file__).with_name("inside.py").read_text(encoding="utf-8")


def _python() -> str:
    return os.path.realpath(sys.executable)


@functools.cache
def _readable() -> list[str]:
    """What a Python program reads: the interpreter, the standard library and shared libraries."""
    paths = sysconfig.get_paths()
    wanted = [_python(), paths["stdlib"], paths["platstdlib"], f"{sys.base_exec_prefix}/lib"]
    wanted += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"]
    return list(dict.fromkeys(path for path in wanted if os.path.exists(path)))
