"""Files that are readable at every moment, whenever the process that writes them dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from tandem.errors import DataError, file_errors
from tandem.observability.inside import opened
from tandem.observability.lock import NO_LOCKS_HERE

_TAIL = 64
"""Bytes before what is new by which a file is known again."""
LARGEST = 1 << 30
"""Bytes of a file of lines."""
LONGEST_LINE = 16 << 20
"""Bytes of a line."""


class GrowingFile:
    """The lines of a file that grows, or is written anew, between two looks.

    Args:
        path: the file; it may come later.
        last: bytes of its end that the first look takes; all, where none are given.
        folder: within which it must lie; None: anywhere.
    """

    def __init__(self, path: Path, last: int | None = None, folder: Path | None = None) -> None:
        self._path, self._last, self._folder = path, last, folder
        self._read, self._tail = 0, b""

    def look(self) -> tuple[bool, list[bytes]]:
        """Whether the file was written anew since the last look, or is gone, and its new lines. A last one
        without its end is left for the next time.

        Raises:
            DataError: the file is no regular one, lies elsewhere, or is too large.
        """
        try:
            file = opened(self._path, self._folder)
        except FileNotFoundError:
            self._read, self._tail = 0, b""
            return True, []
        torn = 0
        with file:
            if self._last is not None:
                self._read = max(file.seek(0, os.SEEK_END) - self._last, 0)
                torn, self._last = int(self._read > 0), None
            if (size := os.fstat(file.fileno()).st_size) - self._read > LARGEST:
                raise DataError(
                    "is too large", field=str(self._path), got=f"{size} bytes", expected=f"{LARGEST} at most"
                )
            file.seek(self._read - len(self._tail))
            anew = file.read(len(self._tail)) != self._tail
            if anew:
                self._read, self._tail = file.seek(0), b""
            new = file.read(LARGEST)
        if len(new) - new.rfind(b"\n") > LONGEST_LINE:
            raise DataError(
                "has a line without an end", field=str(self._path), expected=f"{LONGEST_LINE} bytes at most"
            )
        new = new[: new.rfind(b"\n") + 1]
        self._read += len(new)
        self._tail = (self._tail + new)[-_TAIL:]
        return anew, new.splitlines()[torn:]


def replace_file(path: Path, content: bytes) -> None:
    """All of the content or, after a crash, all of what was there before."""
    partial = path.with_name(path.name + ".partial")
    with file_errors(path), partial.open("wb") as file:
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
    with file_errors(path), path.open("a+b") as file:
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
