"""Read a run's timeline: the phases of each worker in a step, and the waits between workers.

New events are read as the run grows.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict, deque
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tandem.observability.files import GrowingFile
from tandem.texts import parse_json
from tandem.viewer.index import Codes

_STEP = "step"
_WHOLE = (_STEP, "testing")  # phases of the controller that consist of the work of others
_SHORTEST_WAIT = 0.02  # share of a step; shorter waits are left out
_LONGEST_LINE = 1 << 20
_LONGEST_NAME = 300  # characters of a worker's or a phase's name


class Span(NamedTuple):
    """A phase of one worker.

    Attributes:
        track: the worker, such as "actor rank 0".
        name: the phase.
        start: seconds after the start of the step.
        end: seconds after the start of the step.
        depth: number of phases that enclose this phase.
    """

    track: str
    name: str
    start: float
    end: float
    depth: int


class Phases:
    """A reader of the finished phases in a `timeline.json`.

    Args:
        run: the run folder. The file may not exist yet.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._begin()

    def _begin(self) -> None:
        self._file = GrowingFile(self._run / "timeline.json", folder=self._run)
        self._lines: deque[bytes] = deque()
        self._workers: dict[int, str] = {}
        self._open: dict[int, list[tuple[str, float, int | None]]] = {}
        self._names = Codes()
        self._spans = array("d")  # five numbers per phase: codes of track and name, start, end, depth
        self._steps: dict[int, tuple[float, float]] = {}

    def look(self) -> None:
        """Read the lines that were written since the last call.

        A damaged line ends the call. The next call continues after that line.

        Raises:
            ValueError: a line is not an event of a timeline.
        """
        rewritten, lines = self._file.look()
        if rewritten:
            self._begin()
            _, lines = self._file.look()
        self._lines += lines
        while self._lines:
            self._take(self._lines.popleft().strip().rstrip(b","))

    def _take(self, line: bytes) -> None:
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"a line of timeline.json is longer than {_LONGEST_LINE} bytes")
        if line in (b"[", b"]", b""):
            return
        event = parse_json(line)
        kind, track = event["ph"], event["tid"]
        if kind == "M":
            self._workers[track] = str(event["args"]["name"])[:_LONGEST_NAME]
            return
        opened = self._open.setdefault(track, [])
        if kind == "B":
            opened.append((str(event["name"])[:_LONGEST_NAME], event["ts"] / 1e6, event["args"].get(_STEP)))
        elif kind == "E" and opened:
            name, start, step = opened.pop()
            end = event["ts"] / 1e6
            worker = self._workers.get(track, str(track))
            self._spans.extend((self._names.of(worker), self._names.of(name), start, end, len(opened)))
            if name == _STEP:
                number = step if isinstance(step, int) else max(self._steps, default=0) + 1
                self._steps[number] = (start, end)

    @property
    def steps(self) -> list[int]:
        """Return the numbers of the finished steps.

        If a step was repeated after a resume, only its last run counts.
        """
        return sorted(self._steps)

    def step(self, number: int) -> tuple[float, list[Span]]:
        """Return the duration of a step in seconds, and its phases sorted by start.

        Phases up to the start of the next step count, so the step includes the validation and the checkpoint
        after it. Phases of a later step that ran ahead do not extend the duration.

        Raises:
            KeyError: there is no such step.
        """
        start, end = self._steps[number]
        following = min((s for s, _ in self._steps.values() if s >= end), default=math.inf)
        spans = np.frombuffer(self._spans).reshape(-1, 5)
        spans = spans[(spans[:, 3] > start) & (spans[:, 2] < following)]
        spans[:, 2:4] -= start
        names = self._names.texts
        found = [
            Span(names[int(track)], names[int(name)], begun, ended, int(depth))
            for track, name, begun, ended, depth in spans.tolist()
        ]
        until = max((span.end for span in found if span.end <= following - start), default=0.0)
        return max(end - start, until), sorted(found, key=lambda span: (span.start, -span.end))


def waits(spans: list[Span], seconds: float) -> list[dict[str, Any]]:
    """Return the intervals in which workers were idle in a step, the longest interval first.

    Each interval has `track`, `start` and `end`. It also has `other` and `phase`, the worker and phase that
    overlap most with the interval, and `share`, the overlap as a fraction of the interval.

    Args:
        spans: the phases of the step, sorted by start.
        seconds: the duration of the step.
    """
    outer = [span for span in spans if span.depth == 0]
    work = [span for span in outer if span.name not in _WHOLE]
    done = {span.track: 0.0 for span in outer}
    idle = []
    for span in outer:
        idle.append((span.track, done[span.track], span.start))
        done[span.track] = max(done[span.track], span.end)
    idle += [(track, at, seconds) for track, at in done.items()]
    long = [_wait(work, *gap) for gap in idle if gap[2] - gap[1] > _SHORTEST_WAIT * seconds]
    return sorted(long, key=lambda wait: wait["start"] - wait["end"])


def _wait(work: list[Span], track: str, start: float, end: float) -> dict[str, Any]:
    filled: defaultdict[tuple[str, str], float] = defaultdict(float)
    for span in work:
        if span.track != track and (common := min(end, span.end) - max(start, span.start)) > 0:
            filled[span.track, span.name] += common
    (other, phase), most = max(filled.items(), key=itemgetter(1), default=(("", ""), 0.0))
    share = most / (end - start)
    return {"track": track, "start": start, "end": end, "other": other, "phase": phase, "share": share}
