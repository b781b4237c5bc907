"""The sink for ClearML. ClearML's configuration file or environment variables name the server."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

from tandem.observability.sinks.base import GENERATIONS, Generation, RunInfo

# ClearML reads this at import. Otherwise it forks this process for a reporter, while threads hold locks.
os.environ.setdefault("CLEARML__SDK__DEVELOPMENT__REPORT_USE_SUBPROCESS", "false")

from clearml import Task


class ClearMLSink:
    def __init__(self, info: RunInfo) -> None:
        # By default ClearML reads every Python file below the working directory to find imports.
        Task.force_requirements_env_freeze(force=True)
        self._task = Task.init(
            project_name=info.project,
            task_name=info.experiment,
            continue_last_task=False,
            output_uri=False,
            auto_connect_frameworks=False,
        )
        self._task.connect_configuration(dict(info.config), name="config")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        logger = self._task.get_logger()
        for name, value in metrics.items():
            title, _, series = name.partition("/")
            if math.isfinite(value):  # ClearML would record a NaN as 0
                logger.report_scalar(title, series or title, value, iteration=step)

    def log_generations(self, step: int, generations: Sequence[Generation]) -> None:
        title, _, series = GENERATIONS.partition("/")
        table = [list(Generation._fields), *map(list, generations)]
        self._task.get_logger().report_table(title, series, iteration=step, table_plot=table)

    def close(self) -> None:
        self._task.close()
