"""Files that are readable at every moment, whenever the process that writes them dies."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """All of the content or, after a crash, all of what was there before."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def append_line(path: Path, line: str, *, durable: bool = False) -> None:
    """Appends `line` on a line of its own; a last line that a crash tore is cut off first.

    Args:
        durable: return only when it is on disk.
    """
    with path.open("a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line.encode() + b"\n")
        file.flush()
        if durable:
            os.fsync(file.fileno())


def whole_lines(path: Path) -> list[str]:
    """The lines that were written to their end."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return text[: text.rfind("\n") + 1].splitlines()
