"""The interface of sinks: places for metrics besides metrics.jsonl in the run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Facts about the run for sinks.

    Attributes:
        project: the project name of the run.
        experiment: the experiment name of the run.
        folder: the run folder; sinks that write files write them below it.
        total_steps: the last step of the run.
        start_step: the last finished step, if a run is resumed.
        config: the resolved config as plain nested dicts.
    """

    project: str
    experiment: str
    folder: Path
    total_steps: int
    start_step: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)


class Generation(NamedTuple):
    """A response as people read it.

    `prompt` holds the messages, each after its role; for a prompt that is not a conversation it is empty.
    `score` is the reward of the response.
    """

    prompt: str
    response: str
    score: float


GENERATIONS = "val/generations"
"""The name of a validation's responses in trackers."""


class Sink(Protocol):
    """A receiver of metrics, one step at a time, in the order of the steps."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_generations(self, step: int, generations: Sequence[Generation]) -> None:
        """Show responses of the validation after a step. Their metrics come later."""
        ...

    def close(self) -> None:
        """Send everything that is still buffered."""
        ...


class TrackedRun:
    """A sink for libraries whose runs take numbers and tables per step, such as Weights & Biases.

    Args:
        run: a run that the library started.
        table: creates the library's table from `columns`, the names, and `data`, the rows.
    """

    def __init__(self, run: Any, table: Callable[..., Any]) -> None:
        self._run, self._table = run, table

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_generations(self, step: int, generations: Sequence[Generation]) -> None:
        table = self._table(columns=list(Generation._fields), data=list(map(list, generations)))
        self._run.log({GENERATIONS: table}, step=step)

    def close(self) -> None:
        self._run.finish()
