"""Measure the time of phases: seconds per phase for the metrics, and a Chrome trace of all phases.

The trace has the JSON array format of the Trace Event Format, in which the closing bracket is optional. Each
event is appended as one line when it happens. So chrome://tracing and Perfetto can open the file during the
run and after the run was killed. An interrupted phase has a start and no end.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tandem.observability.files import append_line, whole_lines
from tandem.texts import parse_json

_numbers = itertools.count()


class Timeline:
    """A timer for the phases of one worker. Phases may be nested. Threads must not share a timeline.

    Several timelines, of one or many processes, may write to one file.

    Args:
        path: the trace file to append to; None: only the seconds are stored.
        process: the name of the worker's track in the trace, such as "controller" or "actor rank 3".
        synchronize: called before each reading of the clock. Use for instance `torch.cuda.synchronize` if the
            work of a phase would otherwise be counted in a later phase.
        ranges: makes a range for the profiler of the device, such as `torch.cuda.nvtx.range`.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        process: str = "controller",
        synchronize: Callable[[], None] | None = None,
        ranges: Callable[[str], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self._path = None if path is None else Path(path)
        self._synchronize = synchronize
        self._range = ranges or nullcontext
        self._seconds: dict[str, float] = {}
        # Wall-clock time that advances with the monotonic clock, so that a resumed run follows the first run.
        self._epoch = time.time() - time.perf_counter()
        # Every timeline has its own track. On a shared track, an open phase of an earlier process, or of
        # another worker in this process, would swallow this timeline's phases.
        self._track = (round(time.time() * 1000) + next(_numbers)) % 2**31
        self._write({"name": "thread_name", "ph": "M", "args": {"name": process}})

    @contextmanager
    def phase(self, name: str, **details: Any) -> Iterator[None]:
        """Measure the time of the block. If a phase occurs several times, its times are added up.

        Args:
            name: the phase.
            **details: JSON values that the trace shows with the phase.
        """
        start = self.now()
        self._event("B", name, start, details)
        try:
            with self._range(name):
                yield
        finally:
            end = self.now()
            self._seconds[name] = self._seconds.get(name, 0.0) + end - start
            self._event("E", name, end, {})

    def take(self) -> dict[str, float]:
        """Return the seconds per phase since the last call, as `timing/NAME`."""
        taken = {f"timing/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken

    def now(self) -> float:
        """Return the current time of the timeline's clock, in seconds."""
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()

    def _event(self, kind: str, name: str, at: float, details: dict[str, Any]) -> None:
        self._write({"name": name, "ph": kind, "ts": round((self._epoch + at) * 1e6), "args": details})

    def _write(self, event: dict[str, Any]) -> None:
        if self._path is not None:
            text = json.dumps(event | {"pid": os.getpid(), "tid": self._track})
            append_line(self._path, text + ",", header="[")


def read_timeline(path: str | Path) -> list[dict[str, Any]]:
    """Return the events of a trace, also of a running run. An incomplete last line is ignored."""
    return [parse_json(line.rstrip(",")) for line in whole_lines(Path(path))[1:]]
