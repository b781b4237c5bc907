"""Run a config to its end: build the trainer, train, shut down, and restart after a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from tandem.config.root import TrainConfig
from tandem.config.supervised import RMConfig, SFTConfig
from tandem.config.trainer import RunConfig
from tandem.errors import WorkerFailure
from tandem.observability.files import append_line
from tandem.trainer.assembly import build_ppo, build_supervised
from tandem.trainer.loop import Listener
from tandem.trainer.planning import memory_explained
from tandem.trainer.ppo import PPOTrainer
from tandem.trainer.supervised import SupervisedTrainer
from tandem.trainer.telling import ending

FAILURES = "failure.txt"
"""The file in the run's log folder with the reports of worker failures."""


class RunSection(Protocol):
    """A config with a `trainer` section."""

    @property
    def trainer(self) -> RunConfig: ...

    def model_copy(self, *, update: dict[str, Any]) -> Self: ...


C = TypeVar("C", bound=RunSection)
Build = Callable[[C], PPOTrainer | SupervisedTrainer]
"""A function that makes a trainer from a config."""


def run_ppo(
    config: TrainConfig,
    *,
    say: Callable[[str], None],
    trainer: type[PPOTrainer] = PPOTrainer,
    listeners: Sequence[Listener] = (),
) -> bool:
    """Train with reinforcement learning until the run ends; see `run` for results and errors.

    Args:
        config: The resolved config.
        say: Prints a sentence for the user.
        trainer: The trainer class.
        listeners: Functions that are called after each step.
    """
    return run(config, partial(build_ppo, say=say, trainer=trainer, listeners=listeners), say)


def run_sft(config: SFTConfig, *, say: Callable[[str], None]) -> bool:
    """Train on example responses (SFT) until the run ends; see `run` for results and errors."""
    return run(config, partial(build_supervised, say=say), say)


def run_rm(config: RMConfig, *, say: Callable[[str], None]) -> bool:
    """Train a reward model until the run ends; see `run` for results and errors."""
    return run(config, partial(build_supervised, say=say), say)


def run(config: C, build: Build[C], say: Callable[[str], None]) -> bool:
    """Train until the run ends, and restart after failures of workers.

    All workers are stopped when this function returns or raises. If a worker fails and a restart may help,
    the run starts again, at most `trainer.max_restarts` times.

    Args:
        config: The resolved config.
        build: Makes the trainer.
        say: Prints a sentence for the user.

    Returns:
        Whether an interrupt (Ctrl-C or SIGTERM) ended the run before its last step.

    Raises:
        WorkerFailure: A worker failed and no restart is left. The report is also in the run's log folder.
        TandemError: Any other error that the user can fix.
    """
    folder = Path(config.trainer.default_local_dir)
    for left in reversed(range(config.trainer.max_restarts + 1)):
        trainer = None
        try:
            with memory_explained(config):
                trainer = build(config)
                try:
                    trainer.fit()
                finally:
                    trainer.shutdown()
            if not trainer.session.interrupted:
                say(ending(folder, steps_taken=trainer.steps_taken))
            return trainer.session.interrupted
        except WorkerFailure as failure:
            report = folder / "log" / FAILURES
            report.parent.mkdir(parents=True, exist_ok=True)
            append_line(report, f"{datetime.now().isoformat(timespec='seconds')}\n{failure}\n")
            interrupted = trainer is not None and trainer.session.interrupted
            if interrupted or not (failure.restartable and left):
                say(f"The run has failed. The report is in {report}.")
                raise
            if trainer is not None and trainer.session.saved:  # else start where this attempt started
                changes = {"resume_mode": "auto", "resume_from_path": None}
                config = config.model_copy(update={"trainer": config.trainer.model_copy(update=changes)})
            say(f"{failure}\nThe report is in {report}. Starting again; restarts left: {left - 1}.")
    raise AssertionError("the last attempt returns or raises")
