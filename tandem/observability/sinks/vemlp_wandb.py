"""The sink for Volcano Engine's experiment tracking, which has the API of Weights & Biases.

These environment variables name the account: VOLC_ACCESS_KEY_ID, VOLC_SECRET_ACCESS_KEY, MLP_TRACKING_REGION.
"""

from __future__ import annotations

import os

import volcengine_ml_platform
from volcengine_ml_platform import wandb

from tandem.errors import ConfigError
from tandem.observability.sinks.base import RunInfo, TrackedRun

_ENVIRONMENT = ("VOLC_ACCESS_KEY_ID", "VOLC_SECRET_ACCESS_KEY", "MLP_TRACKING_REGION")


class VemlpWandbSink(TrackedRun):
    def __init__(self, info: RunInfo) -> None:
        missing = [name for name in _ENVIRONMENT if name not in os.environ]
        if missing:
            raise ConfigError(
                "vemlp_wandb needs environment variables that are not set",
                field="trainer.logger",
                got=f"no {', '.join(missing)}",
                remedy="export them, or remove vemlp_wandb from trainer.logger",
            )
        access_key, secret_key, region = (os.environ[name] for name in _ENVIRONMENT)
        volcengine_ml_platform.init(ak=access_key, sk=secret_key, region=region)
        run = wandb.init(project=info.project, name=info.experiment, config=dict(info.config))
        super().__init__(run, wandb.Table)
