"""A run's timeline, read on as it grows: what each worker did, by step, and what waited for what."""

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
_WHOLE = (_STEP, "testing")  # phases of the controller that are made of others' work
_SHORTEST_WAIT = 0.02  # share of a step; shorter waits are not told
_LONGEST_LINE = 1 << 20
_LONGEST_NAME = 300  # characters of a worker's or a phase's name


class Span(NamedTuple):
    """A phase of one worker.

    Attributes:
        track: the worker, such as "actor rank 0".
        name: the phase.
        start, end: seconds after the step began.
        depth: of how many other phases it is part.
    """

    track: str
    name: str
    start: float
    end: float
    depth: int


class Phases:
    """The finished phases of a `timeline.json`.

    Args:
        run: the run folder; the file may come later.
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
        self._spans = array("d")  # of each the codes of its track and name, its start, end and depth
        self._steps: dict[int, tuple[float, float]] = {}

    def look(self) -> None:
        """Read what was written since the last look. A damaged line ends the look; the next one goes on
        behind it.

        Raises:
            ValueError: a line is no event of a timeline.
        """
        anew, lines = self._file.look()
        if anew:
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
        """The numbers of the steps that are finished; of one done again after a resume, the last counts."""
        return sorted(self._steps)

    def step(self, number: int) -> tuple[float, list[Span]]:
        """Return how many seconds a step took, and the phases within, by their start: up to the next step's
        begin and so with the validation and the checkpoint that follow it, though not what of a later step
        ran ahead.

        Raises:
            KeyError: no such step.
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
    """Return where workers were idle in a step, the longest first: `track`, `start`, `end`, and what they
    waited for, the phase of another worker that filled most of that time: `other`, `phase`, `share`.

    Args:
        spans: of the step, by their start.
        seconds: that it took.
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
