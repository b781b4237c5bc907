"""What a sink is: somewhere that metrics go besides the run folder's metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


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


@dataclass(frozen=True, slots=True)
class Generation:
    """A response, as people read it.

    Attributes:
        prompt: the messages, each after its role; empty for a prompt that is no conversation.
        response: the text.
        score: what it was worth.
    """

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
