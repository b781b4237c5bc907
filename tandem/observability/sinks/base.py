"""The interface of sinks, which receive a run's metrics in addition to metrics.jsonl."""

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
        folder: the run folder. Sinks write their files below this folder.
        total_steps: the last step of the run.
        start_step: the last finished step if the run is resumed, else 0.
        config: the resolved config as plain nested dicts.
    """

    project: str
    experiment: str
    folder: Path
    total_steps: int
    start_step: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)


class Generation(NamedTuple):
    """A response as text, for people.

    `prompt` has the messages with their roles. It is empty if the prompt is not a conversation. `score` is
    the reward of the response.
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
        """Show responses of the validation after a step. `log` is called later for the same step."""
        ...

    def close(self) -> None:
        """Send all buffered values."""
        ...


class TrackedRun:
    """A sink for libraries whose runs accept numbers and tables per step, such as Weights & Biases.

    Args:
        run: a run that the library started.
        table: a function of `columns` (names) and `data` (rows) that creates a table of the library.
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
