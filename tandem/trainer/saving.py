"""A run's checkpoints: written while everything waits, or while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tandem.checkpoint.background import PendingSave, ask_writers, await_pending
from tandem.checkpoint.manager import CheckpointManager
from tandem.config.trainer import RunConfig
from tandem.errors import CheckpointError, WorkerFailure
from tandem.runtime import WorkerGroup

WRITE_LIMIT_S = 1800.0
"""A checkpoint that takes longer to write has stopped."""
_AFTER_FAILURE_S = 10.0
"""So long what was begun may still end when a worker has failed, which may be one that writes."""


class ReferenceMember:
    """The reference among the groups whose state goes into checkpoints: it may be part of the actor's group,
    so each call of a method names it.

    Args:
        group: the reference's.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, method: str) -> Callable[..., None]:
        return partial(getattr(self._group, method), role="ref")


Members = Mapping[str, WorkerGroup | ReferenceMember]
"""The groups whose state goes into checkpoints, by name."""


@dataclass
class Saver:
    """Writes checkpoints, one at a time.

    Attributes:
        checkpoints: where they go.
        config: says how.
        members: gives the names and groups whose state is saved.
        there: is told the folder of each checkpoint once it is whole.
        say: prints a sentence to the user.
    """

    checkpoints: CheckpointManager
    config: RunConfig
    members: Callable[[], Members]
    there: Callable[[Path], None]
    say: Callable[[str], None]
    _pending: PendingSave | None = field(default=None, init=False)
    _told: bool = field(default=False, init=False)

    def save(self, step: int, state: dict[str, Any], metrics: Mapping[str, float], *, wait: bool) -> Path:
        """Writes a checkpoint of all members, once the one before is there.

        Args:
            wait: return only when it is there.

        Returns:
            its folder.

        Raises:
            CheckpointError: it, or the one before, could not be written.
        """
        self.finish()
        best = self.checkpoints.judge
        if best is not None and best.value(metrics) is None and not self._told:
            self._told = True
            self.say(
                f"trainer.keep_best: step {step} has no finite {best.metric}; the checkpoints of such "
                "steps cannot be the best"
            )
        if not self.config.async_save:
            writers = {name: group.save_checkpoint for name, group in self.members().items()}
            path = self.checkpoints.save(step, writers, state, metrics)
            self.there(path)
            return path
        starters = {name: group.begin_save for name, group in self.members().items()}
        self._pending = self.checkpoints.begin(step, starters, state, metrics)
        path = self._pending.path
        if wait:
            self.finish()
        return path

    def check(self) -> None:
        """Looks, at a step's boundary, whether the checkpoint that is being written is there, or has failed.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._pending is not None:
            with self._until_settled(self._pending) as pending:
                if pending.wait(0):
                    pending.check()
                else:
                    ask_writers(pending, self._ask)

    def finish(self) -> None:
        """Waits for the checkpoint that is being written.

        Raises:
            CheckpointError: it could not be written, or not in time.
        """
        if self._pending is not None:
            with self._until_settled(self._pending) as pending:
                await_pending(pending, self._ask, WRITE_LIMIT_S)

    def end(self, error: BaseException) -> None:
        """After an error, which stays the one that counts: what was begun is finished if that is still
        possible, and given up after a second interrupt."""
        if self._pending is None:
            return
        try:
            if isinstance(error, Exception) and not isinstance(error, WorkerFailure):
                self.finish()
                return
            if isinstance(error, WorkerFailure):
                self._pending.wait(_AFTER_FAILURE_S)
            with self._until_settled(self._pending) as pending:
                pending.give_up(CheckpointError("given up, for the run has ended"))
                pending.check()
        except Exception as second:
            self.say(f"the checkpoint begun last was not written: {second}")

    @contextmanager
    def _until_settled(self, pending: PendingSave) -> Iterator[PendingSave]:
        """Takes the end of what is being written to account, if the block saw it end."""
        try:
            yield pending
        except Exception:
            self._pending = None
            raise
        if pending.wait(0):
            self._pending = None
            self.there(pending.path)

    def _ask(self) -> None:
        for group in self.members().values():
            group.check_save()
