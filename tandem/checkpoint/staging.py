"""Write folders atomically: after a crash, a folder is either complete or does not exist."""

from __future__ import annotations

import errno
import os
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.errors import CheckpointError
from tandem.observability.reading import bytes_below

TEMPORARY = ".tmp"
REPLACED = ".replaced"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_ROOM = 64 * 1024
"""Bytes of free space below which any error counts as a full disk.

This is needed because some libraries report a full disk with their own exceptions.
"""


@contextmanager
def staged(final: Path, *, needed: int | None = None) -> Iterator[Path]:
    """Yield an empty temporary folder, `final`.tmp, which is renamed to `final` when the block ends.

    All files are flushed to disk before the folder is renamed. An existing folder `final` is replaced. If the
    block raises an error, the temporary folder is removed and the existing folder stays.

    Args:
        final: the final path.
        needed: number of bytes that will be written, if known; used in the message about a full disk.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written.
    """
    folder = final.with_name(final.name + TEMPORARY)
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        yield folder
        for path in (*folder.rglob("*"), folder):
            sync(path)
        if final.exists():
            final.rename(final.with_name(final.name + REPLACED))
        folder.rename(final)
        sync(final.parent)
        recover(final)
    except BaseException as error:
        user_error = _user_error(error, folder, needed)
        if user_error is not None:
            # The stack frames of failed writers keep files open, and open files keep their disk space.
            for cause in _chain(error):
                traceback.clear_frames(cause.__traceback__)
        # Files that cannot be removed now are removed at the next start. Report the first error.
        shutil.rmtree(folder, ignore_errors=True)
        recover(final)
        if user_error is None:
            raise
        raise user_error from error


def recover(final: Path) -> None:
    """Complete the replacement of a folder that a crash interrupted.

    If the new folder exists, the old folder is removed; otherwise the old folder gets its name back.
    """
    old = final.with_name(final.name + REPLACED)
    if old.exists() and final.exists():
        shutil.rmtree(old)
    elif old.exists():
        old.rename(final)


def files_below(folder: Path) -> list[Path]:
    """Return all files in a folder and its subfolders, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sync(path: Path) -> None:
    """Flush a file, or the list of names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _user_error(error: BaseException, folder: Path, needed: int | None) -> CheckpointError | None:
    """Return an error for the user that replaces `error`; None if `error` should be raised unchanged."""
    if not isinstance(error, Exception) or isinstance(error, CheckpointError):
        return None
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if _disk_full(error) or free < _NO_ROOM:
        return CheckpointError(
            "the disk is full",
            field=str(folder.parent),
            got=f"{_megabytes(free)} free after {_megabytes(bytes_below(folder))} were written",
            expected=None if needed is None else f"about {_megabytes(needed)} free, like the previous one",
            remedy="free disk space, or lower trainer.max_ckpt_to_keep; earlier checkpoints are intact",
        )
    if isinstance(error, OSError):
        return CheckpointError(
            "this folder cannot be written", field=str(folder), got=f"{type(error).__name__}: {error}"
        )
    return None


def _disk_full(error: BaseException) -> bool:
    """Return whether an exception or one of its causes reports a full disk, by errno or in its message."""
    return any(
        (isinstance(cause, OSError) and cause.errno in _FULL)
        or any(os.strerror(number) in str(cause) for number in _FULL)
        for cause in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and the exceptions that caused it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
