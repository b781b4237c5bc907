"""One run from its config to its end: built, trained, shut down; and started again after a failure."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from tandem.config.root import TrainConfig
from tandem.errors import WorkerFailure
from tandem.observability.files import append_line
from tandem.trainer.build import build_ppo
from tandem.trainer.ppo import PPOTrainer

FAILURES = "failure.txt"
"""In the run's log folder: the reports of its failures."""


def run_ppo(
    config: TrainConfig, *, say: Callable[[str], None], trainer: type[PPOTrainer] = PPOTrainer
) -> bool:
    """Trains to the end. However it ends, no worker is left. A worker's failure that need not come again
    is followed by a new start, `trainer.max_restarts` times.

    Args:
        say: prints a sentence to the user.
        trainer: the loop's class.

    Returns:
        whether an interrupt (Ctrl-C or SIGTERM) ended it before its last step.

    Raises:
        WorkerFailure: one too many; the report is in the run's log folder too.
        TandemError: anything else the user can act on.
    """
    for restart in range(config.trainer.max_restarts + 1):
        attempt = Attempt(config, say, trainer)
        try:
            return attempt.run()
        except WorkerFailure as failure:
            report = _record(failure, Path(config.trainer.default_local_dir))
            left = config.trainer.max_restarts - restart
            if not (failure.restartable and left) or attempt.interrupted:
                say(f"The run has failed; the report is in {report}.")
                raise
            config = attempt.config_of_next()
            say(f"{failure}\nThe report is in {report}. Starting again; restarts left: {left - 1}.")
    raise AssertionError("the last attempt returns or raises")


class Attempt:
    """One start of a run.

    Args:
        config, say, trainer: see `run_ppo`.
    """

    def __init__(self, config: TrainConfig, say: Callable[[str], None], trainer: type[PPOTrainer]) -> None:
        self.config = config
        self._say = say
        self._class = trainer
        self._trainer: PPOTrainer | None = None

    def run(self) -> bool:
        """Builds, trains and shuts down; whether an interrupt ended it."""
        self._trainer = build_ppo(self.config, say=self._say, trainer=self._class)
        try:
            self._trainer.fit()
        finally:
            self._trainer.shutdown()
        return self.interrupted

    @property
    def interrupted(self) -> bool:
        return self._trainer is not None and self._trainer.session.interrupted

    def config_of_next(self) -> TrainConfig:
        """Goes on from a checkpoint of this attempt's if there is one, else from where it began itself."""
        if self._trainer is None or not self._trainer.session.saved:
            return self.config
        changes = {"resume_mode": "auto", "resume_from_path": None}
        return self.config.model_copy(update={"trainer": self.config.trainer.model_copy(update=changes)})


def _record(failure: WorkerFailure, run: Path) -> Path:
    """Adds a report to the run's log."""
    path = run / "log" / FAILURES
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, f"{datetime.now().isoformat(timespec='seconds')}\n{failure}\n")
    return path
