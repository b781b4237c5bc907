"""Everything in a training run except the algorithm: run folder, loggers, checkpoints, interrupts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from tandem.checkpoint.best import Best
from tandem.checkpoint.manager import Checkpoint, CheckpointManager, open_checkpoint
from tandem.config.resume import check_same
from tandem.config.root import TrainConfig
from tandem.config.sources import to_yaml
from tandem.config.supervised import SupervisedConfig
from tandem.config.trainer import RunConfig
from tandem.config.written import to_dict, tracked_name
from tandem.errors import CheckpointError
from tandem.lifetime import last_words
from tandem.observability.lock import ProcessLock
from tandem.observability.reading import FORMAT, Run
from tandem.observability.run import RunFolder
from tandem.observability.sinks.base import RunInfo
from tandem.observability.sinks.registry import Sinks
from tandem.observability.stacks import offer_stacks
from tandem.observability.timers import Timeline
from tandem.trainer.saving import Members, Saver
from tandem.trainer.telling import beginning
from tandem.watch.watch import Watch

PRIVATE = 0o700
"""The permission bits of a folder that only its user may read."""
WARNING = "Warning after step"
"""The start of a warning about a step."""
RunsConfig = TrainConfig | SupervisedConfig
"""The config of a training command: RL, SFT or reward model."""


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run folder that is ready for a run.

    Attributes:
        config: The `trainer` section of the config.
        folder: The folder.
        checkpoint: The checkpoint that the run resumes from; None for a new run.
        checkpoints: Reads and writes the checkpoints in the folder.
        lock: The lock on the folder, which this process holds.
        resolved: The resolved config, which is written to the folder after the checkpoint is accepted.
    """

    config: RunConfig
    folder: RunFolder
    checkpoint: Checkpoint | None
    checkpoints: CheckpointManager
    lock: ProcessLock
    resolved: dict[str, Any]

    def beginning(self, model: str, rows: int, what: str, steps: int) -> str:
        """Return the message for the start of the run; see `tandem.trainer.telling.beginning`."""
        checkpoint = None if self.checkpoint is None else self.checkpoint.path
        return beginning(model, rows, what, steps, Path(self.config.default_local_dir), checkpoint)

    @property
    def names(self) -> tuple[str, str]:
        """The names of project and run, without secrets, for loggers and Ray."""
        config, written = self.config, self.resolved["trainer"]
        return (
            tracked_name(config.project_name, written["project_name"]),
            tracked_name(config.experiment_name, written["experiment_name"]),
        )

    @property
    def again(self) -> str:
        """A phrase for messages: the command that resumes from the newest checkpoint."""
        how = "" if self.config.resume_mode == "auto" else " with trainer.resume_mode=auto"
        return f"the same command{how}"


def open_run(whole: RunsConfig, say: Callable[[str], None]) -> OpenRun:
    """Open the run folder and find the checkpoint to resume from, before anything expensive is done.

    If the folder has an earlier run that is not resumed, its files are moved into a backup folder, so that no
    file is overwritten.

    Raises:
        CheckpointError: The checkpoint that the config names is missing or damaged.
        ConfigError: Another process writes to the folder, or the folder contains another experiment.
    """
    config = whole.trainer
    best = None if config.keep_best is None else Best(config.keep_best, config.keep_best_mode)
    path = Path(config.default_local_dir).absolute()  # workers may have another working directory
    mode = PRIVATE if config.private_folder else 0o777
    lock = ProcessLock(path / "run.lock", "trainer.default_local_dir", say, folder_mode=mode)
    with ExitStack() as undo:
        lock.acquire()
        undo.callback(lock.release)
        folder = RunFolder(path)
        checkpoints = CheckpointManager(folder.checkpoints, config.max_ckpt_to_keep, best=best, log=say)
        checkpoint: Checkpoint | None = None
        if config.resume_mode == "resume_path":
            assert config.resume_from_path is not None, "the config refuses this mode without a path"
            checkpoint = open_checkpoint(Path(config.resume_from_path).absolute())
            if later := checkpoints.later_than(checkpoint.step):  # they would look like this run's
                say(f"checkpoints of later steps were moved to {folder.move_to_earlier(later)}")
        elif config.resume_mode == "auto":
            checkpoint = checkpoints.latest()
        if checkpoint is not None:
            meant = config.resume_mode == "resume_path" or config.resume_with_changes  # a named path is meant
            check_same(checkpoint.path, whole, allowed=meant, say=say)
        elif earlier := folder.set_aside():
            say(f"{folder.path} held an earlier run; its files were moved to {earlier}")
        offer_stacks(folder.logs)
        undo.pop_all()
    return OpenRun(config, folder, checkpoint, checkpoints, lock, to_dict(whole))


class Session:
    """The folder, loggers and checkpoints of a run, from `restore` to the end of the `with` block.

    Args:
        run: The run folder, ready for the run.
        members: A dict from name to a worker group whose state is saved.
        total_steps: The number of training steps, for the loggers.
        say: Prints a sentence for the user.
    """

    def __init__(self, run: OpenRun, members: Members, total_steps: int, say: Callable[[str], None]) -> None:
        self.run = run
        self.folder = run.folder
        self.members = members
        self.total_steps = total_steps
        self.timeline = Timeline(run.folder.timeline_file)
        self.interrupted = False
        self.finishes_steps = False
        """Whether an interrupt (Ctrl-C, SIGTERM) waits for the end of the step; False before the first step.
        """
        self._stopped_said = False
        self.saved = False
        """Whether this process has written a complete checkpoint."""
        self.restored: dict[str, float] = {}
        """The metrics of the step that the run resumed from."""
        self._sinks: Sinks | None = None
        self._print = say
        self.watch = Watch(run.resolved["data"]["train_batch_size"], self._warn)
        self._saver = Saver(run.checkpoints, run.config, lambda: self.members, self._note_saved, self.say)

    def say(self, sentence: str) -> None:
        """Print a sentence for the user and write it to the run's log."""
        self.folder.log(sentence)
        self._print(sentence)

    def __enter__(self) -> Session:
        self.run.lock.acquire()
        self.folder.log(f"started as process {os.getpid()}")
        last_words.append(self._last_word)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        how = "failed"
        try:
            if error is None or isinstance(error, GeneratorExit):  # the caller wants no more steps
                self._saver.finish()
                if self.interrupted:
                    self._stopped_said = True
                    self.say("stopped")
            elif isinstance(error, KeyboardInterrupt):
                self._saver.end(error)
                self._say_stopped()
            else:
                with suppress(OSError):  # a full disk must not hide the error that ended the run
                    self.folder.log(f"stopped by {kind.__name__ if kind else ''}: {error}")
                self._saver.end(error)
            stopped = self.interrupted or isinstance(error, KeyboardInterrupt | GeneratorExit)
            how = "interrupted" if stopped else "finished" if error is None else "failed"
        finally:
            self._write_end(how)
            last_words.remove(self._last_word)
            if self._sinks:
                self._sinks.close()
            self.run.lock.release()

    def _write_end(self, how: str) -> None:
        with suppress(OSError):  # as above
            self.folder.event("end", how=how)

    def _last_word(self) -> None:
        """Write the final message; called if a second signal ends the process at once."""
        self._write_end("interrupted")
        self._say_stopped()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Let an interrupt (Ctrl-C, SIGTERM) inside the block finish the current step.

        In other threads than the main thread this does nothing, because only the main thread receives
        signals.
        """
        self.interrupted = False
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self._on_interrupt) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _say_stopped(self) -> None:
        if self._stopped_said:
            return
        self._stopped_said = True
        whole = sorted(path.name for path in self.folder.checkpoints.glob("step_*"))
        if not whole:
            self.say("stopped; no checkpoint was saved")
            return
        newest = self.folder.checkpoints / whole[-1]
        self.say(f"stopped; checkpoint {newest} is complete, and {self.run.again} resumes from it")

    def _on_interrupt(self, number: int, _frame: FrameType | None) -> None:
        if self.interrupted or not self.finishes_steps:
            raise KeyboardInterrupt
        self.interrupted = True
        # os.write and not print, because the signal may arrive in the middle of a print.
        again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
        with suppress(OSError):  # standard error is closed, or full
            sentence = f"the run finishes and saves this step, then stops; {again} stops it at once"
            os.write(2, f"interrupted: {sentence}\n".encode())

    def restore(self, load: Callable[[dict[str, Any]], None], *, forget: bool = True) -> int:
        """Load the checkpoint to resume from, if there is one.

        Args:
            load: A function that restores the trainer's state from the value that `save` received.
            forget: Whether to delete the records of steps after the checkpoint, because the run repeats these
                steps.

        Returns:
            The step of the checkpoint; 0 for a new run.

        Raises:
            CheckpointError: The checkpoint lacks a model that this run trains.
        """
        checkpoint = self.run.checkpoint
        step = 0 if checkpoint is None else checkpoint.step
        if checkpoint is not None:
            missing = [name for name in self.members if not (checkpoint.path / name).is_dir()]
            if missing:
                raise CheckpointError(
                    "the checkpoint lacks a model that this run trains",
                    field=str(checkpoint.path),
                    got=sorted(path.name for path in checkpoint.path.iterdir() if path.is_dir()),
                    expected=sorted(self.members),
                    remedy="resume with the config that the checkpoint was made with, or set "
                    "trainer.resume_mode=disable",
                )
            self.load_members(checkpoint.path)
            load(checkpoint.state["trainer"])
            if forget:
                self.folder.trim_after(step)
        resolved, config = self.run.resolved, self.run.config
        self.folder.write_config(to_yaml(resolved))
        before = Run(self.folder.path)
        rows = {row["step"]: row for row in before.metrics if row["step"] <= step}
        self.watch.restore(
            rows.values(),
            {event["name"]: event["text"] for event in before.events if event["event"] == "warning"},
        )
        self.folder.event("start", step=step, total_steps=self.total_steps, format=FORMAT)
        info = RunInfo(*self.run.names, self.folder.path, self.total_steps, start_step=step, config=resolved)
        self._sinks = Sinks(config.logger, info, report=self.say)
        if checkpoint is not None:
            if step in rows:
                self.restored = {name: value for name, value in rows[step].items() if name != "step"}
            else:  # the run crashed after saving the checkpoint and before writing the step's metrics
                self.restored = checkpoint.state["metrics"]
                self.log(step, self.restored)
            self.say(f"resumed from {checkpoint.path} after step {step}")
        return step

    def load_members(self, checkpoint: Path) -> None:
        """Load the state of all members from the folder of a checkpoint."""
        for name, group in self.members.items():
            group.load_checkpoint(checkpoint / name)

    def save(
        self, step: int, state: dict[str, Any], metrics: Mapping[str, float], *, wait: bool = False
    ) -> Path:
        """Write a checkpoint of all members, the trainer's state and the step's metrics.

        Args:
            step: The number of the step.
            state: The trainer's state.
            metrics: The metrics of the step.
            wait: Return only when the checkpoint is complete, even with `trainer.async_save`. An interrupted
                run always waits.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: This checkpoint, or the previous one, could not be written.
        """
        kept = {"trainer": state, "metrics": dict(metrics)}
        with self.timeline.phase("save_checkpoint"):
            path = self._saver.save(step, kept, metrics, wait=wait or self.interrupted)
        if self.interrupted:
            self.say(f"saved {path}; {self.run.again} resumes from it")
        return path

    def check_save(self) -> None:
        """Check between two steps whether a checkpoint that is written in the background has failed.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        self._saver.check()

    def _note_saved(self, path: Path) -> None:
        self.saved = True
        self.folder.log(f"saved {path}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics to metrics.jsonl and all loggers, and report warnings about them."""
        self.folder.log_metrics(step, metrics)
        assert self._sinks is not None, "restore comes before the first log"
        self._sinks.log(step, metrics)
        self.watch.check_learning(step, metrics)

    def _warn(self, name: str, sentence: str, step: int) -> None:
        """Print a warning about a step, and write it to the run folder's events."""
        self.folder.event("warning", name=name, step=step, text=sentence)
        self.say(f"{WARNING} {step}: {sentence}.")

    def show_generations(self, step: int, count: int) -> None:
        """Send `count` responses of the validation after a step to the loggers."""
        if count and self._sinks is not None:
            self._sinks.log_generations(step, self.folder.generations(step, count))
