"""Files that are readable at every moment, whenever the process that writes them dies."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import BinaryIO

from tandem.errors import DataError
from tandem.observability.lock import NO_LOCKS_HERE


def opened(path: Path) -> BinaryIO:
    """A file, to be read. A pipe in its place, for which one would wait without end, is refused."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise DataError("is no regular file", field=str(path))
    return path.open("rb")


def replace_file(path: Path, content: bytes) -> None:
    """All of the content or, after a crash, all of what was there before."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def append_line(path: Path, line: str, *, header: str | None = None, durable: bool = False) -> None:
    """Appends `line` on a line of its own; a last line that a crash tore is cut off first. Several
    processes may append to one file: they take turns by a lock on it, which ends with its holder.

    Args:
        header: the line that a file begins with.
        durable: return only when it is on disk.
    """
    with path.open("a+b") as file:
        _lock(file)
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.seek(0)
                end = file.truncate(file.read().rfind(b"\n") + 1)
        lines = [line] if end or header is None else [header, line]
        file.write("".join(f"{each}\n" for each in lines).encode())
        file.flush()
        if durable:
            os.fsync(file.fileno())


def _lock(file: BinaryIO) -> None:
    """Until the file is closed. A file system without locks does without; each line is one write."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS_HERE:
            raise


def whole_lines(path: Path) -> list[str]:
    """The lines that were written to their end."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return text[: text.rfind("\n") + 1].splitlines()
