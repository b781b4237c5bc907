"""Functions for files that stay readable if the writing process crashes at any time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from tandem.errors import DataError, file_errors
from tandem.observability.inside import opened
from tandem.observability.lock import NO_LOCKS_HERE

_TAIL = 64
"""The number of bytes before the new part that must be unchanged; else the file counts as rewritten."""
LARGEST = 1 << 30
"""The largest accepted size of a file of lines, in bytes."""
LONGEST_LINE = 16 << 20
"""The largest accepted length of a line, in bytes."""


class GrowingFile:
    """A reader of the lines of a file that may grow, or be rewritten, between two calls of `look`.

    Args:
        path: the file; it may not exist yet.
        last: the number of bytes at the end of the file that the first call reads; None: the whole file.
        folder: the folder that must contain the file; None: any folder.
    """

    def __init__(self, path: Path, last: int | None = None, folder: Path | None = None) -> None:
        self._path, self._last, self._folder = path, last, folder
        self._read, self._tail = 0, b""

    def look(self) -> tuple[bool, list[bytes]]:
        """Read the lines that were added since the last call.

        A last line without a line end is left for the next call.

        Returns:
            Whether the file was rewritten or removed since the last call, and the new lines.

        Raises:
            DataError: If the file is not a regular file, is outside the folder, or is too large.
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
                    "the file is too large",
                    field=str(self._path),
                    got=f"{size} bytes",
                    expected=f"<= {LARGEST}",
                )
            file.seek(self._read - len(self._tail))
            rewritten = file.read(len(self._tail)) != self._tail
            if rewritten:
                self._read, self._tail = file.seek(0), b""
            new = file.read(LARGEST)
        if len(new) - new.rfind(b"\n") > LONGEST_LINE:
            raise DataError(
                "a line is too long", field=str(self._path), expected=f"lines of at most {LONGEST_LINE} bytes"
            )
        new = new[: new.rfind(b"\n") + 1]
        self._read += len(new)
        self._tail = (self._tail + new)[-_TAIL:]
        return rewritten, new.splitlines()[torn:]


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: after a crash, it has either the whole new or the whole old content."""
    partial = path.with_name(path.name + ".partial")
    with file_errors(path), partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def append_line(path: Path, line: str, *, header: str | None = None, durable: bool = False) -> None:
    """Append a line; if a crash left the last line incomplete, remove this line first.

    Several processes may append to one file. A lock on the file lets one process write at a time. The system
    releases the lock if its holder dies.

    Args:
        path: the file.
        line: the line, without a line end.
        header: the first line of a new file.
        durable: return only when the line is on disk.
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
    """Lock the file until it is closed.

    On a file system without locks, do nothing, because each line is a single write.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS_HERE:
            raise


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file that have a line end."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return text[: text.rfind("\n") + 1].splitlines()
