"""The sink for SwanLab. SWANLAB_MODE (cloud, local, offline, disabled) and SWANLAB_API_KEY apply."""

from __future__ import annotations

from typing import Any

import swanlab

from tandem.observability.sinks.base import RunInfo, TrackedRun


class SwanLabSink(TrackedRun):
    def __init__(self, info: RunInfo) -> None:
        folder = info.folder / "swanlab"
        folder.mkdir(exist_ok=True)
        named = {"project": info.project, "experiment_name": info.experiment, "logdir": str(folder)}
        super().__init__(swanlab.init(**named, config=dict(info.config)), _table)


def _table(columns: list[str], data: list[list[Any]]) -> Any:
    table = swanlab.echarts.Table()
    table.add(columns, data)
    return table
