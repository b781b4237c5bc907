"""SwanLab. SWANLAB_MODE (cloud, local, offline, disabled) and SWANLAB_API_KEY apply as usual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import swanlab

from tandem.observability.sinks.base import GENERATIONS, Generation, RunInfo


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

    def log_generations(self, step: int, generations: Sequence[Generation]) -> None:
        table = swanlab.echarts.Table()
        table.add(
            ["prompt", "response", "score"],
            [[each.prompt, each.response, each.score] for each in generations],
        )
        self._run.log({GENERATIONS: table}, step=step)

    def close(self) -> None:
        self._run.finish()
