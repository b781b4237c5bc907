"""Where the time goes: seconds per phase for the metrics, and a Chrome trace of every phase.

The trace is the JSON array form of the Trace Event Format, whose closing bracket is optional; so it
is one event per line, appended as it happens, and chrome://tracing and Perfetto open it while the run
is alive and after it was killed. A phase that was interrupted shows as begun and not ended.
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
    """Phases of one worker, possibly nested; not shared between threads. Several timelines, of one
    process or of many, may write to one file.

    Args:
        path: the trace to append to; None keeps only the seconds.
        process: what the trace calls this worker's track, such as "controller" or "actor rank 3".
        synchronize: called before each reading of the clock, such as `torch.cuda.synchronize`
            where a phase's work would else be charged to a later one.
        ranges: makes a range that a device's own profiler shows, as `torch.cuda.nvtx.range` does.
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
        # Wall-clock microseconds that advance with the monotonic clock: a resumed run follows the first.
        self._epoch = time.time() - time.perf_counter()
        # A track of its own: a phase that an earlier process left open, or one of another worker in
        # this process, would swallow ours.
        self._track = (round(time.time() * 1000) + next(_numbers)) % 2**31
        self._write({"name": "thread_name", "ph": "M", "args": {"name": process}})

    @contextmanager
    def phase(self, name: str, **details: Any) -> Iterator[None]:
        """Times the block. A phase that occurs several times adds up.

        Args:
            details: JSON values shown with the phase in the trace.
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
        """Seconds per phase since the last call, as `timing/NAME`."""
        taken = {f"timing/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken

    def now(self) -> float:
        """Seconds of the clock that phases are timed by."""
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
    """The events of a trace, finished or not; a last line that a crash tore is left out."""
    return [parse_json(line.rstrip(",")) for line in whole_lines(Path(path))[1:]]
