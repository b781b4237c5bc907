"""Checkpoints that are written while training continues.

In each worker, a thread writes the worker's shards. In the controller, a thread waits for all workers and
then gives the checkpoint its final name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tandem.device import set_threads
from tandem.errors import CheckpointError, EngineError

_POLL_S = 0.02


def written_mark(folder: Path) -> Path:
    """Return the marker file of a checkpoint member, next to the member's folder.

    The file exists as soon as the member is completely written.
    """
    return folder.with_name(folder.name + ".written")


class BackgroundWrite:
    """A worker's background thread for writing, with one write at a time.

    Each write runs on a daemon thread, which does not keep the process alive.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None], mark: Path | None) -> None:
        """Start a write and return.

        Args:
            write: the function that the thread calls.
            mark: path of an empty file that is created after the write, or None.

        Raises:
            EngineError: the previous write has not ended.
            Exception: the error of the previous write, if `check` has not raised it yet.
        """
        if self._thread is not None and self._thread.is_alive():
            raise EngineError("a checkpoint is still being written", remedy="save later, or save less often")
        self.check()
        self._thread = threading.Thread(
            target=self._run, args=(write, mark), name="checkpoint-write", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a failed write.

        Raises:
            Exception: the error of the write, which is raised only once.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], None], mark: Path | None) -> None:
        set_threads(1)
        try:
            write()
            if mark is not None:
                mark.touch()
        except BaseException as error:  # `check` raises it again
            self._error = error


@dataclass(eq=False, repr=False)
class PendingSave:
    """A checkpoint that workers are still writing.

    Args:
        path: the final folder of the checkpoint.
        _staging: an entered context. On a normal exit it renames the temporary folder to `path`. On an error
            it removes the temporary folder and raises an error for the user.
        _marks: marker files, one per member, which exist once the member is written.
        _seal: completes the temporary folder after all members are written.
        _after: called once the checkpoint exists.
    """

    path: Path
    _staging: AbstractContextManager[object]
    _marks: Sequence[Path]
    _seal: Callable[[], None]
    _after: Callable[[], None]

    def __post_init__(self) -> None:
        self._reason: BaseException | None = None
        self._given_up = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint-complete", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for at most `timeout_s` seconds; return whether the save has ended, even if it failed."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raise the error of a failed save.

        Raises:
            Exception: the reason why the checkpoint does not exist.
        """
        if self._error is not None:
            raise self._error

    def give_up(self, reason: BaseException, timeout_s: float = 60.0) -> None:
        """Abort the save and remove the files that were written.

        If all members are already written, the checkpoint is completed instead.

        Args:
            reason: the error for the user, which `check` then raises.
            timeout_s: the maximum waiting time, in seconds.
        """
        self._reason = reason
        self._given_up.set()
        self.wait(timeout_s)

    def _run(self) -> None:
        try:
            with self._staging:
                while not all(mark.exists() for mark in self._marks):
                    if self._given_up.wait(_POLL_S):
                        assert self._reason is not None
                        raise self._reason
                for mark in self._marks:
                    mark.unlink()
                self._seal()
            self._after()
        except BaseException as error:  # `check` raises it again
            self._error = error


def await_pending(pending: PendingSave, ask: Callable[[], None], limit_s: float) -> None:
    """Wait until the checkpoint exists.

    Args:
        pending: the save to wait for.
        ask: a function that raises the error of a failed writer.
        limit_s: maximum waiting time, in seconds.

    Raises:
        CheckpointError: the checkpoint could not be written, or not within `limit_s` seconds.
        Exception: any other error of a writer.
    """
    end = time.monotonic() + limit_s
    while not pending.wait(0.5):
        ask_writers(pending, ask)
        if time.monotonic() > end:
            pending.give_up(
                CheckpointError(
                    "the checkpoint was not written in time",
                    field=str(pending.path),
                    got=f"not finished after {limit_s:.0f} s",
                    remedy="check the disk; the previous checkpoint is intact",
                )
            )
            break
    pending.check()


def ask_writers(pending: PendingSave, ask: Callable[[], None]) -> None:
    """Give up the save if a writer has failed.

    Raises:
        Exception: the reason, as an error for the user.
    """
    try:
        ask()
    except Exception as error:
        pending.give_up(error)
        pending.check()
        raise
