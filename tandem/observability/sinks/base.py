"""What a sink is: somewhere that metrics go besides the run folder's metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a sink may want to know of the run.

    Attributes:
        project, experiment: the names under which the run is filed.
        folder: the run folder; sinks that write files write them below it.
        total_steps: the step at which the run will end.
        start_step: the last step already done, when a run is resumed.
        config: the resolved config as plain nested dicts.
    """

    project: str
    experiment: str
    folder: Path
    total_steps: int
    start_step: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)


class Generation(NamedTuple):
    """A response, as people read it: `prompt` holds the messages, each after its role, and is empty for a
    prompt that is no conversation; `score` says what the response was worth."""

    prompt: str
    response: str
    score: float


GENERATIONS = "val/generations"
"""The name under which trackers file a validation's responses."""


class Sink(Protocol):
    """Takes one step's metrics at a time, in the order of the steps."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_generations(self, step: int, generations: Sequence[Generation]) -> None:
        """Shows responses of the validation after a step, whose metrics come later."""
        ...

    def close(self) -> None:
        """Sends what is still buffered."""
        ...


class TrackedRun:
    """A sink whose library has runs that take numbers and tables by step, as that of Weights & Biases has.

    Args:
        run: as the library began it.
        table: makes the library's table of `columns`, their names, and `data`, the rows.
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
