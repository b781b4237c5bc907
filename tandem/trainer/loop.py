"""The loop of every training run: steps, validation, checkpoints, metrics, and an orderly stop.

A subclass adds the algorithm's work in a step, and the algorithm's state for checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from tandem.config.trainer import TrainerConfig
from tandem.runtime import Backend, BatchFuture, WorkerGroup
from tandem.trainer.perf import take_observed, take_timings, take_usage
from tandem.trainer.profiling import StepProfiler
from tandem.trainer.prompts import Prompts
from tandem.trainer.session import Session

E = TypeVar("E")
"""The experience that an algorithm learns from."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """The schedule of a run's validations, checkpoints, sample files and end.

    Attributes:
        total_steps: The number of training steps.
        test_freq: Validate every this many steps, and at the end; 0 or less: never.
        save_freq: Save a checkpoint every this many steps, and at the end; -1: only at the end; 0: never.
        val_before_train: Whether a new run validates before its first step.
        val_only: Whether the run only validates.
        samples_freq: Write a file of samples every this many steps; 0 or less: never.
    """

    total_steps: int
    test_freq: int
    save_freq: int
    val_before_train: bool = False
    val_only: bool = False
    samples_freq: int = -1

    @classmethod
    def of(cls, run: TrainerConfig, steps: int) -> Rhythm:
        """Return the `Rhythm` of a reinforcement learning run with this many steps."""
        return cls(steps, run.test_freq, run.save_freq, run.val_before_train, run.val_only, run.samples_freq)

    def validates_first(self, step: int) -> bool:
        """Return whether a run that continues after `step` (0 for a new run) starts with a validation."""
        return self.val_only or (self.val_before_train and step == 0)

    def validates(self, step: int) -> bool:
        return self._due(self.test_freq, step)

    def saves(self, step: int) -> bool:
        return self._due(self.save_freq, step) or (self.save_freq < 0 and step == self.total_steps)

    def writes_samples(self, step: int) -> bool:
        return self.samples_freq > 0 and step % self.samples_freq == 0

    def _due(self, frequency: int, step: int) -> bool:
        return frequency > 0 and (step % frequency == 0 or step == self.total_steps)


class Step(NamedTuple):
    """A finished training step.

    Attributes:
        number: The number of the step, from 1.
        metrics: A dict from name to value. The metrics of a validation after the step are included.
        interrupted: Whether the user interrupted the run (Ctrl-C, SIGTERM) during the step. The step was
            still finished and saved.
    """

    number: int
    metrics: dict[str, float]
    interrupted: bool


Listener = Callable[[Step], object]
"""A function that is called after each step."""


class Schedule(Generic[E]):
    """The order in which a run requests prompts, generates responses and learns from the responses.

    In this class, each step generates responses with the newest weights and learns only from these responses.
    A subclass may use another order. Each run needs a separate `Schedule` object.
    """

    def step(self, step: int, loop: Loop[E]) -> dict[str, float]:
        """Take one training step and return its metrics.

        Args:
            step: The number of the step, from 1.
            loop: The loop that calls this method.
        """
        return loop.step(step, loop.next_batch())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of work that was started for later steps, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned; called before the first step."""


class Loop(ABC, Generic[E]):
    """The controller of one run.

    Args:
        rhythm: When the run validates, saves and ends.
        prompts: The training batches.
        session: The run folder, metrics and checkpoints.
        backend: Where the workers run.
        schedule: Decides when the run generates and when it learns; None: first one, then the other, in each
            step.

    Attributes:
        listeners: Functions that are called after each step.
        done: The last finished step.
        steps_taken: The number of steps that this object has finished.
    """

    def __init__(
        self,
        rhythm: Rhythm,
        prompts: Prompts,
        session: Session,
        backend: Backend,
        schedule: Schedule[E] | None = None,
    ) -> None:
        self.rhythm = rhythm
        self.prompts = prompts
        self.session = session
        self.backend = backend
        self.schedule: Schedule[E] = Schedule() if schedule is None else schedule
        self.listeners: list[Listener] = []
        self.profiler = StepProfiler(session.run.config.profile, session.folder, session.say)
        self.done = Step(0, {}, interrupted=False)
        self.steps_taken = 0
        self._saved = 0

    def fit(self) -> None:
        """Run to the last step, or until an interrupt. An interrupted step is first finished and saved."""
        with self.session.listening(), closing(self.steps()) as steps:
            for step in steps:
                if step.interrupted:
                    return

    def steps(self) -> Generator[Step, None, None]:
        """Start the run, yield step 0 or the resumed checkpoint's step, then yield each step when it is done.

        If you close the generator before the last step, the run can be resumed later.
        """
        with self.session as session:
            step = self._saved = session.restore(self._restore, forget=not self.rhythm.val_only)
            first = dict(session.restored)
            if self.can_validate and self.rhythm.validates_first(step):
                first |= self.validate(step)
                session.log(step, first | session.timeline.take())
            self.forget_measures()
            session.finishes_steps = True
            self.done = Step(step, first, interrupted=False)
            yield self.done
            while step < self.rhythm.total_steps and not self.rhythm.val_only:
                step += 1
                with self.profiler.around(step, self.groups), session.timeline.phase("step", step=step):
                    metrics = self.schedule.step(step, self)
                seconds = session.timeline.take() | take_timings(self.groups)
                metrics |= self.rates(seconds, metrics) | self.backend.take_traffic()
                if self.can_validate and self.rhythm.validates(step):
                    with session.timeline.phase("testing"):  # the step's own measures were taken above
                        metrics |= self.validate(step)
                        self.forget_measures()
                interrupted = session.interrupted  # read once: a later interrupt counts for the next step
                if self.rhythm.saves(step) or interrupted:
                    self.save(step, metrics)
                session.log(step, metrics | session.timeline.take())
                session.check_save()
                self.done = Step(step, metrics, interrupted)
                self.steps_taken += 1
                self.at_step_boundary(step)
                for listener in self.listeners:
                    listener(self.done)
                if step == self.rhythm.total_steps:
                    self.profiler.tell()
                yield self.done

    def next_batch(self) -> BatchFuture:
        """Return the prompts or examples of the next step."""
        return self.prompts.next()

    def step(self, step: int, batch: BatchFuture) -> dict[str, float]:
        """Take one step of the algorithm: generate responses to a batch, then learn from the responses.

        Args:
            step: The number of the step, from 1.
            batch: A result of `next_batch`.

        Returns:
            The metrics of the step.
        """
        return self.learn(step, self.generate(step, batch))

    @abstractmethod
    def generate(self, step: int, batch: BatchFuture) -> E:
        """Generate responses with the current weights, and return the experience that the step learns from.

        This method may return before the workers have finished; `learn` waits for them.
        """

    @abstractmethod
    def learn(self, step: int, experience: E) -> dict[str, float]:
        """Update the weights and return the step's metrics."""

    @property
    @abstractmethod
    def can_validate(self) -> bool:
        """Whether the run has validation data."""

    @abstractmethod
    def validate(self, step: int) -> dict[str, float]:
        """Validate with the weights after `step`, and return the metrics."""

    @property
    @abstractmethod
    def groups(self) -> Sequence[WorkerGroup]:
        """All worker groups, without duplicates."""

    @abstractmethod
    def rates(self, seconds: dict[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics of a step's speed.

        Args:
            seconds: `timing/PHASE` of the controller and the workers, in seconds.
            metrics: The metrics of the step.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the controller's state. The workers save the state of the models."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    def at_step_boundary(self, step: int) -> None:
        """Do nothing. The loop calls this after each step, when the step is finished and logged.

        A subclass may move workers or change the rhythm here.
        """

    def save(self, step: int, metrics: dict[str, float], *, wait: bool = False) -> Path:
        """Save a checkpoint and return its folder; see `Session.save`."""
        begun = self.schedule.state_dict()
        state = self.state_dict() | ({"schedule": begun} if begun else {})
        path = self.session.save(step, state, metrics, wait=wait)
        self._saved = step
        self.forget_measures()
        return path

    def save_last(self) -> Path:
        """Save a checkpoint of the last finished step, wait until it is written, and return its folder."""
        return self.save(self.done.number, self.done.metrics, wait=True)

    def save_unsaved(self) -> None:
        """Save a checkpoint of the last finished step, unless there is one already."""
        if self.done.number > self._saved:
            self.save_last()

    def forget_measures(self) -> None:
        """Drop the counts and timings that workers recorded outside of steps, such as for loading models.

        Otherwise the next step's metrics would include these counts and timings.
        """
        take_observed(self.groups)
        take_timings(self.groups)
        take_usage(self.groups, elapsed_s=1.0)
        self.backend.take_traffic()

    def shutdown(self) -> None:
        """Stop all workers and release the run folder."""
        self.backend.shutdown()
        self.session.run.lock.release()

    def _restore(self, state: dict[str, Any]) -> None:
        self.load_state_dict(state)
        self.schedule.load_state_dict(state.get("schedule", {}))
