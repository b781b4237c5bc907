"""Programs run on this machine, each in a sandbox of its own.

A program has no network and none of the parent's environment, reads the Python installation alone, and writes
in a folder of its own that is watched and removed. It ends as one group of processes.
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
    Begun,
    Bubblewrap,
    Limits,
    Protection,
    Sandlock,
    holding,
)

Status = Literal["finished", "error", "timeout", "output", "disk"]
OUTPUT_BYTES = 4 << 20
WATCH_SECONDS = 0.05  # how often a program's folder is measured
CPU_TIME_SIGNALS = (-24, 152)


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


def protection() -> str:
    """The name and version of what holds the programs on this machine.

    Raises:
        RewardError: nothing does; says why not, and what to install.
    """
    return _found()[0]


def run(program: str, stdin: str, limits: Limits, kind: type[Protection] | None = None) -> Run:
    """Runs a Python program in a sandbox.

    Args:
        kind: what holds it; None: what `protection` names.

    Raises:
        RewardError: there is none, or it did not start.
    """
    kind = kind or _found()[1]
    try:
        with (
            holding(kind) as held,
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
        raise RewardError("a sandbox did not start", got=f"{type(error).__name__}: {error}") from error


def _watched(begun: Begun, box: str, limits: Limits) -> Run:
    """Reads what a program writes until its first process ends or a limit is met, and ends all of it."""
    texts = {begun.stdout: bytearray(), begun.stderr: bytearray()}
    poll = select.poll()
    for descriptor in (*texts, begun.done):
        poll.register(descriptor, select.POLLIN)
    met: Status | None = None
    finished, deadline, watch = False, time.monotonic() + limits.seconds, 0.0
    try:
        while met is None:
            ready = [descriptor for descriptor, _ in poll.poll(WATCH_SECONDS * 1000)]
            if finished := ready == [begun.done]:  # all that it wrote has been read
                break
            for descriptor in set(ready) - {begun.done}:
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
        code = begun.end(not finished)
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
def _found() -> tuple[str, type[Protection]]:
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
        "nothing on this machine keeps a model's programs from harm",
        field="a reward that runs programs",
        got="; ".join(problems),
        expected="sandlock, on Linux 6.12 or newer, or bubblewrap, where user namespaces are allowed",
        remedy="pip install 'tandem[sandbox]', or install bubblewrap, or name a server: reward.sandbox.url",
    )
