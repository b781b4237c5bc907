"""A run's timeline, read on as it grows: what each worker did, by step, and what waited for what."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tandem.observability.inside import opened
from tandem.texts import parse_json
from tandem.viewer.index import Codes

_STEP = "step"
_WHOLE = (_STEP, "testing")  # phases of the controller that are made of others' work
_SHORTEST_WAIT = 0.02  # share of a step; shorter waits are not told
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of one worker.

    Attributes:
        track: the worker, such as "actor rank 0".
        name: the phase.
        start, end: seconds.
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
        self._run, self._path = run, run / "timeline.json"
        self._forget()

    def _forget(self) -> None:
        self._read = 0
        self._track_names: dict[int, str] = {}
        self._open: dict[int, list[tuple[str, float, int | None]]] = {}
        self._names, self._tracks = Codes(), Codes()
        self._starts, self._ends = array("d"), array("d")
        self._codes = array("I")  # track, name, depth of each
        self._steps: dict[int, tuple[float, float]] = {}

    def look(self) -> None:
        """Reads what was written since the last look.

        Raises:
            ValueError: the file is no timeline.
        """
        try:
            file = opened(self._path, self._run)
        except FileNotFoundError:
            self._forget()
            return
        with file:
            if file.seek(0, os.SEEK_END) < self._read:
                self._forget()
            file.seek(self._read)
            while (line := file.readline(_LONGEST_LINE)).endswith(b"\n"):
                self._read += len(line)
                if line.strip() not in (b"[", b"]", b""):
                    self._take(parse_json(line.rstrip().rstrip(b",")))
        if len(line) == _LONGEST_LINE:
            raise ValueError(f"a line of timeline.json is longer than {_LONGEST_LINE} bytes")

    def _take(self, event: dict[str, Any]) -> None:
        kind, track = event["ph"], event["tid"]
        if kind == "M":
            self._track_names[track] = str(event["args"]["name"])
            return
        opened = self._open.setdefault(track, [])
        if kind == "B":
            opened.append((str(event["name"]), event["ts"] / 1e6, event["args"].get(_STEP)))
        elif kind == "E" and opened:
            name, start, step = opened.pop()
            worker = self._track_names.get(track, str(track))
            self._starts.append(start)
            self._ends.append(event["ts"] / 1e6)
            self._codes.extend((self._tracks.of(worker), self._names.of(name), len(opened)))
            if name == _STEP:
                number = step if isinstance(step, int) else max(self._steps, default=0) + 1
                self._steps[number] = (start, event["ts"] / 1e6)

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps that are finished; of one done again after a resume, the last counts."""
        return sorted(self._steps)

    def step(self, number: int) -> tuple[float, float, list[Span]]:
        """When a step began and ended, and the phases within, by their start: up to the next step's begin
        and so with the validation and the checkpoint that follow it, though not what of a later step ran
        ahead.

        Raises:
            KeyError: no such step.
        """
        start, end = self._steps[number]
        following = min((s for s, _ in self._steps.values() if s >= end), default=float("inf"))
        within = (np.frombuffer(self._ends) > start) & (np.frombuffer(self._starts) < following)
        spans = [
            Span(self._tracks.texts[track], self._names.texts[name], self._starts[i], self._ends[i], depth)
            for i in within.nonzero()[0].tolist()
            for track, name, depth in [self._codes[3 * i : 3 * i + 3]]
        ]
        until = max((span.end for span in spans if span.end <= following), default=end)
        return start, max(end, until), sorted(spans, key=lambda span: (span.start, -span.end))


def waits(spans: list[Span], start: float, end: float) -> list[dict[str, Any]]:
    """Where workers were idle between `start` and `end`, the longest first: `track`, `start`, `end`, and what
    they waited for, the phase of another worker that filled most of that time: `other`, `phase`, `share`."""
    outer = [span for span in spans if span.depth == 0]
    work = [span for span in outer if span.name not in _WHOLE]
    found = []
    for track in {span.track for span in outer}:
        at = start
        for span in sorted((s for s in outer if s.track == track), key=lambda s: s.start):
            found.append((track, at, span.start))
            at = max(at, span.end)
        found.append((track, at, end))
    long = [(track, a, b) for track, a, b in found if b - a > _SHORTEST_WAIT * (end - start)]
    return sorted((_wait(work, *gap) for gap in long), key=lambda wait: wait["start"] - wait["end"])


def _wait(work: list[Span], track: str, start: float, end: float) -> dict[str, Any]:
    filled: dict[tuple[str, str], float] = {}
    for span in work:
        if span.track != track and (common := min(end, span.end) - max(start, span.start)) > 0:
            key = (span.track, span.name)
            filled[key] = filled.get(key, 0.0) + common
    (other, phase), most = max(filled.items(), key=lambda item: item[1], default=(("", ""), 0.0))
    share = most / (end - start)
    return {"track": track, "start": start, "end": end, "other": other, "phase": phase, "share": share}
