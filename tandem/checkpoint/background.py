"""Checkpoints that are written while training goes on: a thread in each worker writes that worker's share,
and one in the controller waits for all of them, then gives the checkpoint its name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tandem.device import set_threads
from tandem.errors import CheckpointError, EngineError

_LOOK_S = 0.02


def written_mark(folder: Path) -> Path:
    """The file that stands beside the folder of a checkpoint's member once all of that member is written."""
    return folder.with_name(folder.name + ".written")


class BackgroundWrite:
    """A worker's writes, one at a time, each on a thread that does not keep the process alive."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None], mark: Path | None) -> None:
        """Begins and returns.

        Args:
            write: what the thread does.
            mark: an empty file to make afterwards.

        Raises:
            EngineError: the one before has not ended.
            Exception: what the one before raised, if nobody has asked.
        """
        if self._thread is not None and self._thread.is_alive():
            raise EngineError(
                "a checkpoint is still being written", remedy="save again once it is there, or less often"
            )
        self.check()
        self._thread = threading.Thread(
            target=self._run, args=(write, mark), name="checkpoint-write", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Tells of a write that failed.

        Raises:
            Exception: what the write raised, once.
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
        except BaseException as error:  # raised again by `check`
            self._error = error


@dataclass(eq=False, repr=False)
class PendingSave:
    """A checkpoint that others are writing.

    Args:
        path: its folder in the end.
        _staging: makes that folder of the staged one when it is left in order, and removes it when left by
            an error, whose translation for the user it raises; already entered.
        _marks: the files that say that a member is written.
        _seal: completes the staged folder, once they are there.
        _after: what follows when the checkpoint is there.
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
        """Tells whether it has ended, well or not, after so many seconds at most."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def check(self) -> None:
        """Tells of a member that failed.

        Raises:
            Exception: why it ended without a checkpoint.
        """
        if self._error is not None:
            raise self._error

    def give_up(self, reason: BaseException, timeout_s: float = 60.0) -> None:
        """Ends it without a checkpoint, unless all members are written already; what they wrote is removed.

        Args:
            reason: what `check` raises then, in the user's words.
        """
        self._reason = reason
        self._given_up.set()
        self.wait(timeout_s)

    def _run(self) -> None:
        try:
            with self._staging:
                while not all(mark.exists() for mark in self._marks):
                    if self._given_up.wait(_LOOK_S):
                        assert self._reason is not None
                        raise self._reason
                for mark in self._marks:
                    mark.unlink()
                self._seal()
            self._after()
        except BaseException as error:  # raised again by `check`
            self._error = error


def await_pending(pending: PendingSave, ask: Callable[[], None], limit_s: float) -> None:
    """Until the checkpoint is there.

    Args:
        ask: raises what a writer met with.

    Raises:
        CheckpointError: it could not be written, or not within `limit_s` seconds.
        Exception: anything else that a writer met with.
    """
    end = time.monotonic() + limit_s
    while not pending.wait(0.5):
        ask_writers(pending, ask)
        if time.monotonic() > end:
            pending.give_up(
                CheckpointError(
                    "the checkpoint was not written in time",
                    field=str(pending.path),
                    got=f"unfinished after {limit_s:.0f} s",
                    remedy="look at the disk; the checkpoint before is intact",
                )
            )
            break
    pending.check()


def ask_writers(pending: PendingSave, ask: Callable[[], None]) -> None:
    """Ends the checkpoint if a writer has failed.

    Raises:
        Exception: why, in the user's words.
    """
    try:
        ask()
    except Exception as error:
        pending.give_up(error)
        pending.check()
        raise
