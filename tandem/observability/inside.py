"""Files of a folder that somebody else may have made: what is opened is a regular file within it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from tandem.errors import DataError


def inside(path: Path, folder: Path) -> Path:
    """The file that a path leads to, through links that stay within the folder.

    Raises:
        FileNotFoundError: there is none.
        DataError: it lies elsewhere, or is a pipe, a device or a folder.
    """
    real = _within(path, folder)
    if not stat.S_ISREG(real.stat().st_mode):
        raise DataError("is no regular file", field=str(path))
    return real


def opened(path: Path, folder: Path | None = None) -> BinaryIO:
    """A file, to be read. A pipe in its place, for which one would wait without end, is refused.

    Args:
        folder: within which it must lie; None: anywhere.
    """
    if folder is not None:
        path = inside(path, folder)
    elif not stat.S_ISREG(path.stat().st_mode):
        raise DataError("is no regular file", field=str(path))
    # Between the look and the opening another process may put a link or a pipe there.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if folder is None else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise DataError("is no regular file", field=str(path))
    return os.fdopen(file, "rb")


def require_inside(below: Path, folder: Path) -> None:
    """Looks at all that lies below a part of a folder.

    Raises:
        DataError: a link leads out of the folder, or something is neither a file nor a folder.
    """
    _within(below, folder)
    for path, folders, names in os.walk(below):
        for name in folders:
            _within(Path(path, name), folder)
        for name in names:
            inside(Path(path, name), folder)


def _within(path: Path, folder: Path) -> Path:
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(folder)):
        raise DataError(
            "a link leads out of the folder",
            field=str(path),
            got=str(real),
            expected=f"something within {folder}",
            remedy="put a copy in its place",
        )
    return real
