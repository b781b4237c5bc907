"""Run programs on this machine, each in a separate sandbox.

A program has no network access and none of the parent's environment variables. It can read only the Python
installation. It can write only to its folder, whose size is limited and which is removed afterwards. When a
run ends, all its processes are killed.
"""

from __future__ import annotations

import functools
import os
import select
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tandem.errors import RewardError
from tandem.sandbox.protections import (
    FOLDER_BYTES,
    FOLDER_ENTRIES,
    Bubblewrap,
    Limits,
    Protection,
    Sandlock,
    StartedRun,
    idle_sandbox,
)

Status = Literal["finished", "error", "timeout", "output", "disk"]
OUTPUT_BYTES = 4 << 20
WATCH_SECONDS = 0.05  # time between two checks of the size of a program's folder
CPU_TIME_SIGNALS = (-24, 152)


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a program.

    Attributes:
        status: "finished" for exit status 0; "error" for another exit status or a signal; otherwise the limit
            that the program exceeded.
        stdout: the program's standard output; a program that writes more than 4 MiB is stopped.
        stderr: the program's standard error, also limited to 4 MiB.
    """

    status: Status
    stdout: str = ""
    stderr: str = ""


def protection() -> str:
    """Return the name and version of the sandbox that runs programs on this machine.

    Raises:
        RewardError: no sandbox works. The message gives the reason and a package to install.
    """
    return _working_sandbox()[0]


def run(program: str, stdin: str, limits: Limits, kind: type[Protection] | None = None) -> Run:
    """Run a Python program in a sandbox.

    Args:
        program: source code of the program.
        stdin: standard input of the program.
        limits: limits of the program.
        kind: the class of the sandbox; None: the sandbox that `protection` names.

    Raises:
        RewardError: there is no sandbox, or it did not start.
    """
    kind = kind or _working_sandbox()[1]
    try:
        with (
            idle_sandbox(kind) as held,
            tempfile.TemporaryDirectory(
                prefix="tandem-sandbox-", dir=held.folder, ignore_cleanup_errors=True
            ) as folder,
        ):
            for name, text in (("program.py", program), ("stdin.txt", stdin)):
                Path(folder, name).write_bytes(text.encode("utf-8", "replace"))
            box = os.path.join(folder, "box")
            os.mkdir(box)
            try:
                return _watched(held.begin(folder, limits), box, limits)
            finally:
                _remove(box)
    except (OSError, RuntimeError) as error:
        raise RewardError("the sandbox did not start", got=f"{type(error).__name__}: {error}") from error


def _watched(started: StartedRun, box: str, limits: Limits) -> Run:
    """Read the output of a program until its first process ends or a limit is exceeded; then end the run."""
    texts = {started.stdout: bytearray(), started.stderr: bytearray()}
    poll = select.poll()
    for descriptor in (*texts, started.done):
        poll.register(descriptor, select.POLLIN)
    met: Status | None = None
    finished, deadline, watch = False, time.monotonic() + limits.seconds, 0.0
    try:
        while met is None:
            ready = [descriptor for descriptor, _ in poll.poll(WATCH_SECONDS * 1000)]
            if finished := ready == [started.done]:  # all output has been read
                break
            for descriptor in set(ready) - {started.done}:
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
        code = started.end(not finished)
    if met is None:
        met = "timeout" if code in CPU_TIME_SIGNALS else "error" if code else "finished"
    stdout, stderr = (bytes(text).decode("utf-8", "replace") for text in texts.values())
    return Run(met, stdout, stderr)


def _too_large(box: str) -> bool:
    """Return whether a folder is too large, or has subfolders that cannot be read."""
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
    """Remove a folder, even if it has unreadable subfolders or is nested too deeply for Python."""
    try:
        shutil.rmtree(box)
    except (OSError, RecursionError):
        subprocess.run(["chmod", "-R", "u+rwX", box], check=False, capture_output=True)
        subprocess.run(["rm", "-rf", "--", box], check=False, capture_output=True)


@functools.cache
def _working_sandbox() -> tuple[str, type[Protection]]:
    problems = []
    kinds: tuple[type[Protection], ...] = (Sandlock, Bubblewrap)
    for kind in kinds:
        name = kind.__name__.lower()
        if not (version := kind.version()):
            problems.append(f"{name} is not installed")
            continue
        try:
            tried = run("print(6 * 7)", "", Limits(), kind)
        except RewardError as error:
            tried = Run("error", stderr=str(error.got))
        if tried == Run("finished", "42\n"):
            return f"{name} {version}", kind
        problems.append(f"{name} does not work here: {tried.stderr.strip()[-300:] or tried.status}")
    raise RewardError(
        "this machine has no sandbox that could run the model's programs safely",
        field="a reward that runs programs",
        got="; ".join(problems),
        expected="sandlock on Linux 6.12 or newer, or bubblewrap with user namespaces allowed",
        remedy="pip install 'tandem[sandbox]', or install bubblewrap, or set reward.sandbox.url to a server",
    )
