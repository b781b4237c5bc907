"""Volcano Engine's experiment tracking, which speaks the Weights & Biases API.

Its environment names the account: VOLC_ACCESS_KEY_ID, VOLC_SECRET_ACCESS_KEY, MLP_TRACKING_REGION.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import volcengine_ml_platform
from volcengine_ml_platform import wandb

from tandem.errors import ConfigError
from tandem.observability.sinks.base import GENERATIONS, Generation, RunInfo

_ENVIRONMENT = ("VOLC_ACCESS_KEY_ID", "VOLC_SECRET_ACCESS_KEY", "MLP_TRACKING_REGION")


class VemlpWandbSink:
    def __init__(self, info: RunInfo) -> None:
        missing = [name for name in _ENVIRONMENT if name not in os.environ]
        if missing:
            raise ConfigError(
                "vemlp_wandb needs environment variables that are not set",
                field="trainer.logger",
                got=f"no {', '.join(missing)}",
                remedy="export them, or leave vemlp_wandb out of trainer.logger",
            )
        access_key, secret_key, region = (os.environ[name] for name in _ENVIRONMENT)
        volcengine_ml_platform.init(ak=access_key, sk=secret_key, region=region)
        self._run = wandb.init(project=info.project, name=info.experiment, config=dict(info.config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_generations(self, step: int, generations: Sequence[Generation]) -> None:
        rows = [[each.prompt, each.response, each.score] for each in generations]
        table = wandb.Table(columns=["prompt", "response", "score"], data=rows)
        self._run.log({GENERATIONS: table}, step=step)

    def close(self) -> None:
        self._run.finish()
