"""The loop of every training run: steps, validation, checkpoints, metrics, an orderly stop. An algorithm adds
how a step is answered and learnt from, and what of it a checkpoint holds."""

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
    """The steps after which a run validates, saves and ends.

    Attributes:
        total_steps: training steps.
        test_freq: steps between validations, one at the end included; 0 or less: none.
        save_freq: steps between checkpoints, one at the end included; -1: at the end alone; 0: none.
        val_before_train: whether a new run validates before its first step.
        val_only: whether validation is all there is to do.
        samples_freq: steps between files of samples; 0 or less: none.
    """

    total_steps: int
    test_freq: int
    save_freq: int
    val_before_train: bool = False
    val_only: bool = False
    samples_freq: int = -1

    @classmethod
    def of(cls, run: TrainerConfig, steps: int) -> Rhythm:
        """That of a run of reinforcement learning over so many steps."""
        return cls(steps, run.test_freq, run.save_freq, run.val_before_train, run.val_only, run.samples_freq)

    def validates_first(self, step: int) -> bool:
        """Whether a run that goes on after this step, 0 for a new one, begins with a validation."""
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
    """A training step that was done.

    Attributes:
        number: from 1.
        metrics: by name; those of a validation among them where one followed.
        interrupted: whether an interrupt (Ctrl-C, SIGTERM) came during it; it was finished and saved.
    """

    number: int
    metrics: dict[str, float]
    interrupted: bool


Listener = Callable[[Step], object]
"""Is called with each step that is done."""


class Schedule(Generic[E]):
    """The order in which a run asks for prompts, has them answered and learns from the answers: each step
    learns from what the weights of the step before have written, and from nothing else. A subclass is another
    order; each run has an object of its own."""

    def step(self, step: int, loop: Loop[E]) -> dict[str, float]:
        """Take one training step and return its metrics.

        Args:
            step: its number, from 1.
        """
        return loop.step(step, loop.next_batch())

    def state_dict(self) -> dict[str, Any]:
        """The state of work begun for later steps, for a checkpoint after the last step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` gave; called before the first step."""


class Loop(ABC, Generic[E]):
    """The controller of one run.

    Args:
        rhythm: when it validates, saves and ends.
        prompts: its training batches.
        session: the run folder, its metrics and checkpoints.
        backend: where the workers run.
        schedule: the order of generation and learning; None is one after the other.

    Attributes:
        listeners: called with each step that is done.
        done: the last of them.
        steps_taken: how many.
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
        """Runs to the last step, or to an interrupt, whose step is finished and saved first."""
        with self.session.listening(), closing(self.steps()) as steps:
            for step in steps:
                if step.interrupted:
                    return

    def steps(self) -> Generator[Step, None, None]:
        """Begins the run, which gives step 0 or the one resumed from, and then takes a step each time it is
        asked for the next. Closed before the last, it leaves a run that can be resumed."""
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
                    with session.timeline.phase("testing"):  # after the step's own observations were taken
                        metrics |= self.validate(step)
                        self.forget_measures()
                interrupted = session.interrupted  # read once: an interrupt after this is for the next step
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
        """The prompts, or examples, of the next step."""
        return self.prompts.next()

    def step(self, step: int, batch: BatchFuture) -> dict[str, float]:
        """One iteration of the algorithm: the batch is answered, then learnt from.

        Args:
            step: its number, from 1.
            batch: of `next_batch`.

        Returns:
            its metrics.
        """
        return self.learn(step, self.generate(step, batch))

    @abstractmethod
    def generate(self, step: int, batch: BatchFuture) -> E:
        """Answers a batch with the weights as they are now: the experience that a step learns from. It may
        return before the workers have made it; `learn` waits for it."""

    @abstractmethod
    def learn(self, step: int, experience: E) -> dict[str, float]:
        """Updates the weights and returns the step's metrics."""

    @property
    @abstractmethod
    def can_validate(self) -> bool:
        """Whether the run has validation data."""

    @abstractmethod
    def validate(self, step: int) -> dict[str, float]:
        """The metrics of a validation with the weights after that step."""

    @property
    @abstractmethod
    def groups(self) -> Sequence[WorkerGroup]:
        """All worker groups, each once."""

    @abstractmethod
    def rates(self, seconds: dict[str, float], metrics: Mapping[str, float]) -> dict[str, float]:
        """The measures of a step's speed.

        Args:
            seconds: `timing/PHASE`, of the controller and the workers.
            metrics: of the step.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The controller's own state; the models' is their workers'."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""

    def at_step_boundary(self, step: int) -> None:
        """Called after each step, when all of it has been done and reported; does nothing. A subclass may
        move workers or change the rhythm here."""

    def save(self, step: int, metrics: dict[str, float], *, wait: bool = False) -> Path:
        """A checkpoint; its folder. See `Session.save`."""
        begun = self.schedule.state_dict()
        state = self.state_dict() | ({"schedule": begun} if begun else {})
        path = self.session.save(step, state, metrics, wait=wait)
        self._saved = step
        self.forget_measures()
        return path

    def save_last(self) -> Path:
        """The whole checkpoint of the step just done; its folder."""
        return self.save(self.done.number, self.done.metrics, wait=True)

    def save_unsaved(self) -> None:
        """A checkpoint of the step just done, unless there is one."""
        if self.done.number > self._saved:
            self.save_last()

    def forget_measures(self) -> None:
        """Drops what workers counted and timed outside of steps, such as loading models, so that no step is
        charged with it."""
        take_observed(self.groups)
        take_timings(self.groups)
        take_usage(self.groups, elapsed_s=1.0)
        self.backend.take_traffic()

    def shutdown(self) -> None:
        """Ends all workers, and frees the run folder."""
        self.backend.shutdown()
        self.session.run.lock.release()

    def _restore(self, state: dict[str, Any]) -> None:
        self.load_state_dict(state)
        self.schedule.load_state_dict(state.get("schedule", {}))
