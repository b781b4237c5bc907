"""Weights & Biases. WANDB_MODE, WANDB_API_KEY and the rest of its environment apply as usual."""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from tandem.observability.sinks.base import RunInfo


class WandbSink:
    def __init__(self, info: RunInfo) -> None:
        self._run = wandb.init(
            project=info.project, name=info.experiment, config=dict(info.config), dir=str(info.folder)
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
