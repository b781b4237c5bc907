"""The sink for MLflow. It writes to the server in MLFLOW_TRACKING_URI, or a database under RUN/mlflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from tandem.observability.config_file import flat
from tandem.observability.sinks.base import GENERATIONS, Generation, RunInfo

_BATCH = 100  # the most parameters per request
_VALUE_LENGTH = 500  # the most characters of a value that every version of the server accepts


class MLflowSink:
    def __init__(self, info: RunInfo) -> None:
        folder = info.folder / "mlflow"
        server = uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            folder.mkdir(exist_ok=True)
            uri = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
        self._client = MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(info.project)
        # Without a server, MLflow would write files to the working directory.
        files = {} if server else {"artifact_location": (folder / "artifacts").resolve().as_uri()}
        experiment = known.experiment_id if known else self._client.create_experiment(info.project, **files)
        self._run_id = self._client.create_run(experiment, run_name=info.experiment).info.run_id
        given = [(name, value) for name, value in flat(info.config) if value != {}]
        params = [Param(name, str(value)[:_VALUE_LENGTH]) for name, value in given]
        for start in range(0, len(params), _BATCH):
            self._client.log_batch(self._run_id, params=params[start : start + _BATCH])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = round(time.time() * 1000)
        rows = [Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=rows)

    def log_generations(self, step: int, generations: Sequence[Generation]) -> None:
        columns = {name: [getattr(each, name) for each in generations] for name in Generation._fields}
        table = {"step": [step] * len(generations), **columns}
        self._client.log_table(self._run_id, table, f"{GENERATIONS}.json")  # this appends to the table

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
