"""The order in which a run asks for prompts, has them answered, and learns from the answers."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from tandem.runtime import BatchFuture

E = TypeVar("E")


class Learner(Protocol[E]):
    """An algorithm as a schedule sees it. E is the experience that it learns from, which `generate` may
    return before the workers have made it: `learn` waits for it."""

    def next_batch(self) -> BatchFuture:
        """The prompts of the next step."""
        ...

    def generate(self, step: int, batch: BatchFuture) -> E:
        """Answers and scores a batch with the weights as they are now."""
        ...

    def learn(self, step: int, experience: E) -> dict[str, float]:
        """Updates the weights and returns the metrics of the step."""
        ...

    def step(self, step: int, batch: BatchFuture) -> dict[str, float]:
        """`generate` and `learn` in a row."""
        ...


class Schedule(Protocol[E]):
    """A strategy of the loop, one object for each run."""

    def step(self, step: int, learner: Learner[E]) -> dict[str, float]:
        """One training step.

        Args:
            step: its number, from 1.

        Returns:
            its metrics.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state of work begun for later steps, for a checkpoint after the last step."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` gave; called before the first step."""
        ...


class Synchronous(Schedule[Any]):
    """Each step learns from what the weights of the step before have written, and from nothing else."""

    def step(self, step: int, learner: Learner[Any]) -> dict[str, float]:
        return learner.step(step, learner.next_batch())

    def state_dict(self) -> dict[str, Any]:
        """Nothing is begun before its step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to go on from."""
