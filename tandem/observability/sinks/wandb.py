"""Weights & Biases. WANDB_MODE, WANDB_API_KEY and the rest of its environment apply as usual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import wandb

from tandem.observability.sinks.base import GENERATIONS, Generation, RunInfo


class WandbSink:
    def __init__(self, info: RunInfo) -> None:
        self._run = wandb.init(
            project=info.project, name=info.experiment, config=dict(info.config), dir=str(info.folder)
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_generations(self, step: int, generations: Sequence[Generation]) -> None:
        rows = [[each.prompt, each.response, each.score] for each in generations]
        table = wandb.Table(columns=["prompt", "response", "score"], data=rows)
        self._run.log({GENERATIONS: table}, step=step)

    def close(self) -> None:
        self._run.finish()
