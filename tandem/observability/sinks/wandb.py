"""The sink for Weights & Biases. WANDB_MODE, WANDB_API_KEY and its other environment variables apply."""

from __future__ import annotations

import wandb

from tandem.observability.sinks.base import RunInfo, TrackedRun


class WandbSink(TrackedRun):
    def __init__(self, info: RunInfo) -> None:
        named = {"project": info.project, "name": info.experiment, "dir": str(info.folder)}
        super().__init__(wandb.init(**named, config=dict(info.config)), wandb.Table)
