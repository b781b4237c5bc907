"""Trackio: local-first tracking; `trackio show` opens its page. TRACKIO_DIR says where it keeps runs."""

from __future__ import annotations

import trackio

from tandem.observability.sinks.base import RunInfo, TrackedRun


class TrackioSink(TrackedRun):
    def __init__(self, info: RunInfo) -> None:
        run = trackio.init(project=info.project, name=info.experiment, config=dict(info.config))
        super().__init__(run, trackio.Table)
