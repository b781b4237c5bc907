"""Trackio: local-first tracking; `trackio show` opens its page. TRACKIO_DIR says where it keeps runs."""

from __future__ import annotations

from collections.abc import Mapping

import trackio

from tandem.observability.sinks.base import RunInfo


class TrackioSink:
    def __init__(self, info: RunInfo) -> None:
        self._run = trackio.init(project=info.project, name=info.experiment, config=dict(info.config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
