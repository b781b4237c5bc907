"""The page's requests for data: functions that return JSON-like values from the runs."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from tandem.errors import DataError, TandemError
from tandem.observability.inside import inside, opened
from tandem.observability.reading import STEP
from tandem.observability.sample_files import read
from tandem.texts import parse_json
from tandem.viewer.index import UNREADABLE, SampleIndex
from tandem.viewer.query import Query, ordered, selected
from tandem.viewer.sample import GROUP, whole
from tandem.viewer.shelf import Shelf, Viewed
from tandem.viewer.timeline import waits

# Limits of one answer.
EXCERPT = 300  # characters of a text in a list
SIDE_BY_SIDE = 4_000  # characters of a text that is shown next to others
LARGEST = 1e300  # size of a value in a curve; no measured value is larger
POINTS = 4_000  # points of a curve; a longer curve keeps the least and the greatest value of each stretch
COMMUNICATION = "perf/communication_share"  # not a limit: a metric that is computed here from others
SPANS = 20_000  # phases of a step
LOG_BYTES = 200_000
LISTED = 2_000  # events, checkpoints, runs and lengths; if there are more, the last ones are returned
NAMES = 5_000  # names of metrics
CURVES = 100
STEPS = 20_000  # steps that the page offers to choose from
FEW = 200  # names in a list of choices, and damaged files
READ = 60  # responses to one prompt
WAITS = 40  # idle times of workers
LONG = 4_000  # characters of an event
_NUMBERS = (STEP, "val", "score", "length", "prompt")
_TEXTS = {"asked": "prompt", "source": "source", "finish": "finish", "uid": "uid"}
"""A dict from a field of a listed sample, whose value is a text, to the index's code column."""
_EXPORTED = ("step", "uid", "sample", "data_source", "prompt", "response", "score", "why", "ground_truth")
_COLUMNS = (*_EXPORTED, "finish_reason", "prompt_tokens", "response_tokens")


@dataclass(frozen=True, slots=True)
class Download:
    """A file that is created while it is sent."""

    name: str
    kind: str
    pieces: Iterator[str]


def metrics(view: Viewed, query: Query) -> dict[str, Any]:
    """Return the curves of the requested metrics, and the names of all metrics."""
    rows = view.run.metrics
    for row in rows:
        row |= _communication(row)
    names = sorted({name for row in rows for name in row} - {STEP})
    wanted = [name for name in query.text("names").split(",") if name in names][:CURVES]
    return {
        "names": _choices(names, NAMES),
        "curves": {
            name: _thinned([(row[STEP], row[name]) for row in rows if name in row]) for name in wanted
        },
    }


def _communication(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the fractions of a step in which roles moved data, to other roles or between their ranks."""
    moved = [row[name] for name in row if name.startswith(("perf/collective_s/", "perf/transfer_s/"))]
    step = row.get("timing/step", 0.0)
    return {COMMUNICATION: math.fsum(moved) / step} if moved and step > 0 else {}


def _choices(texts: list[str], most: int) -> list[str]:
    return [text for text in texts if len(text) <= EXCERPT][:most]


def _thinned(curve: list[tuple[int, float]]) -> list[list[float]]:
    """Return steps and values of a curve; of a long curve, only the extremes of each interval."""
    points = [point for point in curve if isinstance(point[1], int | float) and abs(point[1]) < LARGEST]
    stride = math.ceil(2 * len(points) / POINTS)
    if len(points) > POINTS:
        stretches = (points[at : at + stride] for at in range(0, len(points), stride))
        value = itemgetter(1)
        points = sorted({point for s in stretches for point in (min(s, key=value), max(s, key=value))})
    return [[step for step, _ in points], [float(f"{value:.6g}") for _, value in points]]


def events(view: Viewed, _: Query) -> dict[str, Any]:
    """Return the run's events and checkpoints, its log, its failure message and its damaged files.

    Events are starts, ends and warnings.
    """
    run, damage = view.run, dict(islice(view.samples.damage.items(), FEW))
    texts = {}
    for name, file in (("log", "run.log"), ("failure", "failure.txt")):
        try:
            texts[name] = _tail(run.path / "log" / file, run.path)
        except DataError as error:
            texts[name], damage[file] = "", str(error)
    checkpoints = list(run.checkpoints.items())[-LISTED:]
    return {
        "events": [_brief(event) for event in run.events[-LISTED:]],
        "checkpoints": [{STEP: step, **_manifest(path, run.path)} for step, path in checkpoints],
        **texts,
        "damage": damage,
    }


def _brief(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event; of a long event, only its type and the start of its text."""
    written = json.dumps(event, ensure_ascii=False)
    if len(written) <= LONG:
        return event
    known = {name: str(event.get(name))[:EXCERPT] for name in ("event", "time", "name", "how")}
    return {**known, STEP: None, "text": str(event.get("text", written))[:LONG]}


def _manifest(checkpoint: Path, run: Path) -> dict[str, Any]:
    try:
        content = parse_json(_tail(checkpoint / "manifest.json", run) or "null")
        return {"digest": str(content["sha256"])[:16], "files": len(content["files"])}
    except (ValueError, TypeError, KeyError) as error:
        return {"digest": "", "files": 0, "damage": f"manifest.json: {error}"[:200]}


def _tail(path: Path, run: Path) -> str:
    """Return the end of a text file within a run folder, or "" if there is no such file."""
    try:
        file = opened(path, run)
    except FileNotFoundError:
        return ""
    with file:
        file.seek(max(file.seek(0, os.SEEK_END) - LOG_BYTES, 0))
        return file.read(LOG_BYTES).decode(errors="replace")


def samples(view: Viewed, query: Query) -> dict[str, Any]:
    """Return one page of the selected samples, and histograms of all selected samples."""
    index = view.samples
    rows, histograms = selected(query, index)
    first, count = query.whole("offset", 0), query.whole("limit", 50, 200)
    descending = query.text("direction", "down") == "down"
    shown = ordered(rows, index, query.text("sort", "order"), descending=descending)
    return {
        "total": len(index.table[STEP]),
        "matched": len(rows),
        "mean": float(np.nanmean(index.table["score"][rows])) if len(rows) else None,
        "indexed": index.indexed,
        "files": index.files,
        "damage": dict(islice(index.damage.items(), FEW)),
        "rows": _listed(index, shown[first : first + count], EXCERPT),
        "histograms": histograms,
        "sources": _choices(index.codes["source"].texts, FEW),
        "finishes": _choices(index.codes["finish"].texts, FEW),
    }


def sample(view: Viewed, query: Query) -> dict[str, Any]:
    """Return one whole sample, with other samples of its prompt's group.

    At most `GROUP` samples of the group are returned, from the requested position on. Without a requested
    position, this sample is in the middle.
    """
    index = view.samples
    row = index.placed(query.text("id"))
    part = index.parts[index.table["part"][row]]
    found = whole(view.run, part.path, int(index.table["row"][row]), query.whole("start", 0))
    group = index.group(row)
    centered = int(np.searchsorted(group, row)) - GROUP // 2
    first = min(query.whole("group", max(centered, 0)), max(len(group) - GROUP, 0))
    return {
        **_listed(index, np.array([row]), 0)[0],
        **found,
        "group": _listed(index, group[first : first + GROUP], SIDE_BY_SIDE),
        "group_start": first,
        "group_total": len(group),
    }


def history(view: Viewed, query: Query) -> dict[str, Any]:
    """Return the policy's responses to one prompt over the run.

    The result has all scores, and a limited number of responses.
    """
    table = view.samples.table
    rows = (table["prompt"] == query.whole("prompt", 0, 2**31)).nonzero()[0]
    return {
        "points": [[int(table[STEP][row]), float(table["score"][row])] for row in rows[-POINTS:]],
        "rows": _listed(view.samples, _evenly(rows, READ), EXCERPT),
    }


def _evenly(values: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` of the values, evenly spaced, including the first and the last value."""
    if len(values) <= most:
        return values
    return values.take(np.linspace(0, len(values) - 1, most).astype(int))


def _listed(index: SampleIndex, rows: np.ndarray, longest: int) -> list[dict[str, Any]]:
    table, codes = index.table, index.codes
    return [
        {
            "id": f"{index.parts[table['part'][row]].path.stem}:{table['row'][row]}",
            "response": response,
            **{name: table[name][row].item() for name in _NUMBERS},
            **{name: codes[code].texts[table[code][row]][:EXCERPT] for name, code in _TEXTS.items()},
        }
        for row, response in zip(rows.tolist(), index.excerpts(rows, longest), strict=True)
    ]


def export(view: Viewed, query: Query) -> Download:
    """Return the selected samples as JSON lines or CSV, with all columns except the tokens.

    Files are read while the rows are sent.
    """
    index, run = view.samples, view.run.path
    rows, _ = selected(query, index)
    parts, within = index.table["part"][rows], index.table["row"][rows]
    chosen = [(index.parts[number], set(within[parts == number].tolist())) for number in np.unique(parts)]
    found = (
        {STEP: int(part.columns[STEP][0]), **row}
        for part, numbers in chosen
        for number, row in enumerate(read(inside(part.path, run), tokens=False))
        if number in numbers
    )
    if query.text("format") == "csv":
        return Download("samples.csv", "text/csv", _csv(found))
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in found)
    return Download("samples.jsonl", "application/jsonl", lines)


class _Line:
    """A file object for a CSV writer. Its `write` returns the text, so the writer returns the text too."""

    write = staticmethod(str)


def _csv(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    writer = csv.DictWriter(_Line, _COLUMNS, extrasaction="ignore")
    yield writer.writeheader()
    yield from map(writer.writerow, rows)


def step_time(view: Viewed, query: Query) -> dict[str, Any]:
    """Return the phases of one step, and the phases that idle workers waited for.

    Without a step number, the last step is used.
    """
    view.phases.look()
    steps = view.phases.steps
    if not steps:
        return {"steps": [], STEP: None}
    number = query.whole(STEP, steps[-1])
    if number not in steps:
        raise DataError(
            "the timeline has no such step", field=STEP, got=number, expected=f"{steps[0]} … {steps[-1]}"
        )
    seconds, spans = view.phases.step(number)
    table = view.samples.table
    lengths = np.sort(table["length"][(table[STEP] == number) & ~table["val"].astype(bool)])
    return {
        "steps": steps[-STEPS:],
        STEP: number,
        "seconds": seconds,
        "spans": spans[:SPANS],
        "left_out": max(len(spans) - SPANS, 0),
        "waits": waits(spans, seconds)[:WAITS],
        "lengths": _evenly(lengths, LISTED).tolist(),
    }


_OF_A_RUN: Mapping[str, Callable[[Viewed, Query], Any]] = {
    "metrics": metrics,
    "config": lambda view, query: view.config(),
    "events": events,
    "samples": samples,
    "sample": sample,
    "history": history,
    "time": step_time,
    "export": export,
}


class Api:
    """The functions that answer the page's requests, keyed by name.

    Args:
        shelf: the runs.

    Attributes:
        routes: a dict from name to a function of the address's parameters.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        of_a_run = {name: partial(self._of_run, answer) for name, answer in _OF_A_RUN.items()}
        self.routes: Mapping[str, Callable[[Query], Any]] = {"runs": self.runs, **of_a_run}

    def runs(self, _: Query) -> list[dict[str, Any]]:
        """Return all runs, each with its state and its progress."""
        found = []
        for view in self._shelf.runs()[-LISTED:]:
            with view.lock:
                found.append(_finite(view.summary()))
        return found

    def _of_run(self, answer: Callable[[Viewed, Query], Any], query: Query) -> Any:
        view = self._shelf.get(query.text("run"))
        with view.lock:
            try:
                return _finite(answer(view, query))
            except TandemError:
                raise
            except UNREADABLE as error:
                raise DataError(f"{type(error).__name__}: {error}"[:1000], field=view.name) from error


def _finite(found: Any) -> Any:
    """Return the same value with None for numbers that JSON cannot represent."""
    if isinstance(found, float):
        return found if math.isfinite(found) else None
    if isinstance(found, dict):
        return {str(name): _finite(value) for name, value in found.items()}
    return [_finite(value) for value in found] if isinstance(found, list | tuple) else found
