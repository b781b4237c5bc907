"""Safe access to files in a folder that another user may have created.

Only regular files inside the folder are opened.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from tandem.errors import DataError


def inside(path: Path, folder: Path) -> Path:
    """Resolve the links of a path, and check that the result is a regular file inside the folder.

    Raises:
        FileNotFoundError: If there is no file.
        DataError: If the file is outside the folder, or is a pipe, a device or a folder.
    """
    real = _within(path, folder)
    if not stat.S_ISREG(real.stat().st_mode):
        raise DataError("this is not a regular file", field=str(path))
    return real


def opened(path: Path, folder: Path | None = None) -> BinaryIO:
    """Open a file for reading. A pipe is refused, because reading it could block forever.

    Args:
        path: the file.
        folder: the folder that must contain the file; None: any folder.
    """
    if folder is not None:
        path = inside(path, folder)
    elif not stat.S_ISREG(path.stat().st_mode):
        raise DataError("this is not a regular file", field=str(path))
    # Another process may replace the file by a link or a pipe after the check, so check again.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if folder is None else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise DataError("this is not a regular file", field=str(path))
    return os.fdopen(file, "rb")


def require_inside(below: Path, folder: Path) -> None:
    """Check that all paths below a subfolder stay inside the folder.

    Raises:
        DataError: If a link leads out of the folder, or a path is neither a file nor a folder.
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
            expected=f"a path inside {folder}",
            remedy="replace the link by a copy",
        )
    return real
