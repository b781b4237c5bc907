"""The sink for Trackio, a local-first tracker.

`trackio show` opens its page. TRACKIO_DIR is the folder of its runs.
"""

from __future__ import annotations

import trackio

from tandem.observability.sinks.base import RunInfo, TrackedRun


class TrackioSink(TrackedRun):
    def __init__(self, info: RunInfo) -> None:
        run = trackio.init(project=info.project, name=info.experiment, config=dict(info.config))
        super().__init__(run, trackio.Table)
