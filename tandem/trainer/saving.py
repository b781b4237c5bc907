"""Write a run's checkpoints, either while all workers wait or in the background while training goes on."""

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
"""The time limit in seconds for writing a checkpoint; after this time, the save counts as failed."""
_AFTER_FAILURE_S = 10.0
"""How long to wait, in seconds, for a started save after a worker has failed.

The failed worker may be one that writes the checkpoint.
"""


class ReferenceMember:
    """The reference policy as a member of a checkpoint, to save and load its weights.

    The reference may be part of the actor's group, so each method call passes its role.

    Args:
        group: The group that has the reference.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, method: str) -> Callable[..., None]:
        return partial(getattr(self._group, method), role="ref")


Members = Mapping[str, WorkerGroup | ReferenceMember]
"""A dict from name to a worker group whose state is stored in checkpoints."""


@dataclass
class Saver:
    """Writes checkpoints, one at a time.

    Attributes:
        checkpoints: The folder of the checkpoints.
        config: The settings for writing checkpoints.
        members: Returns a dict from name to a worker group whose state is saved.
        on_saved: Called with the folder of each checkpoint when it is complete.
        say: Prints a sentence for the user.
    """

    checkpoints: CheckpointManager
    config: RunConfig
    members: Callable[[], Members]
    on_saved: Callable[[Path], None]
    say: Callable[[str], None]
    _pending: PendingSave | None = field(default=None, init=False)
    _warned_no_best: bool = field(default=False, init=False)

    def save(self, step: int, state: dict[str, Any], metrics: Mapping[str, float], *, wait: bool) -> Path:
        """Write a checkpoint of all worker groups that have state, after the previous checkpoint is complete.

        Args:
            step: The number of the step.
            state: The trainer's state.
            metrics: The metrics of the step.
            wait: Return only when the checkpoint is complete.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: This checkpoint, or the previous one, could not be written.
        """
        self.finish()
        best = self.checkpoints.judge
        if best is not None and best.value(metrics) is None and not self._warned_no_best:
            self._warned_no_best = True
            self.say(
                f"trainer.keep_best: step {step} has no finite {best.metric}, so the checkpoints of such "
                "steps cannot be the best"
            )
        if not self.config.async_save:
            writers = {name: group.save_checkpoint for name, group in self.members().items()}
            path = self.checkpoints.save(step, writers, state, metrics)
            self.on_saved(path)
            return path
        starters = {name: group.begin_save for name, group in self.members().items()}
        self._pending = self.checkpoints.begin(step, starters, state, metrics)
        path = self._pending.path
        if wait:
            self.finish()
        return path

    def check(self) -> None:
        """Check between two steps whether the checkpoint that is being written is complete or has failed.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        if self._pending is not None:
            with self._until_settled(self._pending) as pending:
                if pending.wait(0):
                    pending.check()
                else:
                    ask_writers(pending, self._ask)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            CheckpointError: The checkpoint could not be written, or not within the time limit.
        """
        if self._pending is not None:
            with self._until_settled(self._pending) as pending:
                await_pending(pending, self._ask, WRITE_LIMIT_S)

    def end(self, error: BaseException) -> None:
        """Try to finish a started save after an error of the run; a second interrupt abandons the save.

        If the save fails too, the failure is only reported, so that the caller can raise the first error.
        """
        if self._pending is None:
            return
        try:
            if isinstance(error, Exception) and not isinstance(error, WorkerFailure):
                self.finish()
                return
            if isinstance(error, WorkerFailure):
                self._pending.wait(_AFTER_FAILURE_S)
            with self._until_settled(self._pending) as pending:
                pending.give_up(CheckpointError("given up, because the run has ended"))
                pending.check()
        except Exception as second:
            self.say(f"the last checkpoint was started but not written: {second}")

    @contextmanager
    def _until_settled(self, pending: PendingSave) -> Iterator[PendingSave]:
        """Yield the pending save; after the block, clear a failed or complete save, and report a success."""
        try:
            yield pending
        except Exception:
            self._pending = None
            raise
        if pending.wait(0):
            self._pending = None
            self.on_saved(pending.path)

    def _ask(self) -> None:
        for group in self.members().values():
            group.check_save()
