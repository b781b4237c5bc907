"""SwanLab. SWANLAB_MODE (cloud, local, offline, disabled) and SWANLAB_API_KEY apply as usual."""

from __future__ import annotations

from collections.abc import Mapping

import swanlab

from tandem.observability.sinks.base import RunInfo


class SwanLabSink:
    def __init__(self, info: RunInfo) -> None:
        folder = info.folder / "swanlab"
        folder.mkdir(exist_ok=True)
        self._run = swanlab.init(
            project=info.project,
            experiment_name=info.experiment,
            config=dict(info.config),
            logdir=str(folder),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
