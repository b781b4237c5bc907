"""Trackio: local-first tracking; `trackio show` opens its page. TRACKIO_DIR says where it keeps runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import trackio

from tandem.observability.sinks.base import GENERATIONS, Generation, RunInfo


class TrackioSink:
    def __init__(self, info: RunInfo) -> None:
        self._run = trackio.init(project=info.project, name=info.experiment, config=dict(info.config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_generations(self, step: int, generations: Sequence[Generation]) -> None:
        rows = [[each.prompt, each.response, each.score] for each in generations]
        table = trackio.Table(columns=["prompt", "response", "score"], data=rows)
        self._run.log({GENERATIONS: table}, step=step)

    def close(self) -> None:
        self._run.finish()
