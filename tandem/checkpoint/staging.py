"""Folders that appear whole or not at all, whatever happens while they are written."""

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
"""Bytes. Libraries report a full disk in exceptions of their own; below this it is taken for one."""


@contextmanager
def staged(final: Path, *, needed: int | None = None) -> Iterator[Path]:
    """An empty folder `final`.tmp for the block to fill. When the block ends, all in it is forced
    to the disk and it takes the name `final`, in place of a folder that had it; when the block
    raises, it is removed and that folder stays.

    Args:
        final: the name in the end.
        needed: bytes that will be written, if known; for the message about a full disk.

    Raises:
        CheckpointError: the disk is full, or cannot be written.
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
        spoken = _spoken(error, folder, needed)
        if spoken is not None:
            # The failed writers' frames hold their files open, and with them the space on the disk.
            for cause in _chain(error):
                traceback.clear_frames(cause.__traceback__)
        # What cannot be removed now is removed at the next start; the error to report is the first.
        shutil.rmtree(folder, ignore_errors=True)
        recover(final)
        if spoken is None:
            raise
        raise spoken from error


def recover(final: Path) -> None:
    """Ends a replacement that was interrupted: the old folder gets its name back, or goes if the
    new one has it."""
    old = final.with_name(final.name + REPLACED)
    if old.exists() and final.exists():
        shutil.rmtree(old)
    elif old.exists():
        old.rename(final)


def files_below(folder: Path) -> list[Path]:
    """All files, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sync(path: Path) -> None:
    """Forces a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _spoken(error: BaseException, folder: Path, needed: int | None) -> CheckpointError | None:
    """The user's error in place of `error`; None to let that through as it is."""
    if not isinstance(error, Exception) or isinstance(error, CheckpointError):
        return None
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if _disk_full(error) or free < _NO_ROOM:
        return CheckpointError(
            "the disk is full",
            field=str(folder.parent),
            got=f"{_megabytes(bytes_below(folder))} written, then {_megabytes(free)} free",
            expected=None if needed is None else f"about {_megabytes(needed)} free, as the one before took",
            remedy="free space, or keep fewer with trainer.max_ckpt_to_keep; earlier checkpoints are intact",
        )
    if isinstance(error, OSError):
        return CheckpointError("cannot be written", field=str(folder), got=f"{type(error).__name__}: {error}")
    return None


def _disk_full(error: BaseException) -> bool:
    """Tells whether an exception or one of its causes says so, by number or, from libraries, by word."""
    return any(
        (isinstance(cause, OSError) and cause.errno in _FULL)
        or any(os.strerror(number) in str(cause) for number in _FULL)
        for cause in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, and those that led to it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
