"""Locks that give one process exclusive use of a run folder or of an output file."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import weakref
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from tandem.errors import ConfigError, file_errors
from tandem.lifetime import last_words
from tandem.observability.inside import opened
from tandem.texts import parse_json

NO_LOCKS_HERE = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
"""The error numbers of a file system without locks."""

_TAKEN = {errno.EWOULDBLOCK, errno.EACCES}


class ProcessLock:
    """A lock that one process holds until it releases the lock, ends or crashes.

    The lock's file exists while the lock is held, and contains the holder's process and machine. On an NFS
    mount, the lock also applies to other machines, unless the mount has the option `nolock` or `local_lock`.

    Args:
        path: the lock's file.
        field: the config key or argument that names the locked folder or file, for the error.
        say: prints a sentence to the user.
        folder_mode: permissions of the folder of the lock's file, if it is created here; the umask applies.
    """

    def __init__(
        self, path: Path, field: str, say: Callable[[str], None], *, folder_mode: int = 0o777
    ) -> None:
        self.path = path
        self._folder_mode = folder_mode
        self._field = field
        self._say = say
        self._file: BinaryIO | None = None

    def __enter__(self) -> ProcessLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Acquire the lock; do nothing if this object already holds the lock.

        Raises:
            ConfigError: If another process holds the lock (the error names it), or the folder cannot be
                created or written.
        """
        if self._file is not None:
            return
        while self._file is None:
            file = self._opened()
            try:
                self._lock(file)
            except BaseException:
                file.close()
                raise
            if self._is_there(file):
                self._file = file
                _HELD.add(self)
            else:  # the last holder removed the file before it was locked here
                file.close()
        self._report_leftover(_holder(self._file))
        self._file.truncate(0)
        now, pid = datetime.now().isoformat(timespec="seconds"), os.getpid()
        content = {"host": socket.gethostname(), "pid": pid, "since": now, "began": process_start(pid)}
        with file_errors(self.path):
            self._file.write(json.dumps(content).encode())
            self._file.flush()

    def release(self) -> None:
        """Release the lock if this object holds it, and remove its file."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            self.forget()

    def forget(self) -> None:
        """Close the lock's file. After a fork, the original holder keeps the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> BinaryIO:
        try:
            self.path.parent.mkdir(self._folder_mode, parents=True, exist_ok=True)
            return self.path.open("a+b")
        except OSError as error:
            raise ConfigError(
                "this folder is not writable",
                field=self._field,
                got=f"{error.filename}: {error.strerror}",
                expected="an existing or new folder in which this user may write",
                remedy=f"choose another {self._field}, or fix its permissions",
            ) from error

    def _lock(self, file: BinaryIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                holder = _holder(file)
                elsewhere = holder.get("host") != socket.gethostname()
                end = f"kill {holder.get('pid')}" + (f" on {holder.get('host')}" if elsewhere else "")
                raise ConfigError(
                    "another process is writing here",
                    field=self._field,
                    got=f"{self.path.parent}: {_named(holder)}",
                    expected="one process at a time",
                    remedy=f"wait until it ends, stop it ({end}), or choose another {self._field}",
                ) from None
            if error.errno not in NO_LOCKS_HERE:
                raise
            self._say(
                f"{self.path.parent}: this file system has no locks, so a second process is not detected"
            )

    def _report_leftover(self, holder: dict[str, str]) -> None:
        """Tell the user about a lock that an earlier process left behind.

        A process on this machine must have ended without cleaning up. A process on another machine may still
        hold the lock, if the file system does not share locks between machines.
        """
        if holder.get("host") == socket.gethostname():
            self._say(f"{self.path.parent}: {_named(holder)} was killed or crashed")
        elif holder:
            self._say(
                f"{self.path.parent} was locked by {_named(holder)} and is not locked now. If that process "
                "still runs, this file system does not share locks between machines: stop one of the two."
            )

    def _is_there(self, file: BinaryIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False


def is_held(path: Path, folder: Path | None = None) -> bool:
    """Return whether the process in the lock's file is alive.

    The lock itself is not acquired, so other processes can acquire it at the same time. A holder on another
    machine is assumed to be alive.

    Args:
        path: the lock's file.
        folder: the folder that must contain the file; None: any folder.
    """
    try:
        with opened(path, folder) as file:
            holder = _holder(file)
    except FileNotFoundError:
        return False
    if holder.get("host") != socket.gethostname():
        return True
    began = process_start(int(holder["pid"]))
    return began is not None and holder.get("began", began) == began


def process_start(pid: int) -> str | None:
    """Return when a living process of this machine started, in Linux's clock ticks.

    The start time distinguishes the process from a later process with the same id. The result is None for a
    process that has ended.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]  # a zombie has ended


def _holder(file: BinaryIO) -> dict[str, str]:
    """Return the holder's data from the lock's file; {} if the holder has not written it yet."""
    file.seek(0)
    try:
        return {str(name): str(value) for name, value in parse_json(file.read(1 << 16)).items()}
    except ValueError:
        return {}


def _named(holder: dict[str, str]) -> str:
    if not holder:
        return "a process that has just started"
    return f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"


_HELD: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_HELD):
        lock.forget()


def _release_all() -> None:
    for lock in list(_HELD):
        lock.release()


os.register_at_fork(after_in_child=_forget_all)
last_words.append(_release_all)
