"""Profiles of single steps.

PyTorch's profiler runs in every process. Its traces and the phases of the timeline are merged into one Chrome
trace. Profiling does not change the results of a run.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tandem.observability.reading import PHASES
from tandem.observability.timers import read_timeline
from tandem.texts import parse_json

_MEMORY_EVENTS = 100_000
_running: dict[int, tuple[str, profile]] = {}
"""A dict from process id to (name, profiler). A process has one profiler for all of its roles."""


def begin(name: str, *, memory: bool) -> None:
    """Start to profile this process, unless it is already profiled.

    Args:
        name: the name of the process's files.
        memory: also record allocations; on CUDA with their history.
    """
    if os.getpid() in _running:
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        if memory:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
    profiler = profile(activities=activities, profile_memory=memory)
    _running[os.getpid()] = name, profiler
    profiler.start()


def end(folder: Path, *, memory: bool) -> None:
    """Stop the profiler that `begin` started in this process, if there is one, and write its files.

    The files are `NAME.trace.json` and, on CUDA with `memory`, `NAME.memory.pickle` for
    pytorch.org/memory_viz.
    """
    name, profiler = _running.pop(os.getpid(), (None, None))
    if profiler is None:
        return
    profiler.stop()
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"{name}.trace.json"))
    if memory and torch.cuda.is_available():
        torch.cuda.memory._dump_snapshot(str(folder / f"{name}.memory.pickle"))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)


def merge(folder: Path, timeline: Path, path: Path) -> int:
    """Merge the traces of a folder and the timeline's events of the same time. The traces are deleted.

    Args:
        folder: the folder of the traces.
        timeline: the file of the timeline.
        path: the file to write, gzipped JSON for Perfetto or chrome://tracing. Times are in µs since its
            start.

    Returns:
        The number of processes.
    """
    parts = sorted(folder.glob("*.trace.json"))
    events: list[dict[str, Any]] = []
    for part in parts:
        trace = parse_json(part.read_text(encoding="utf-8", errors="replace"))
        since = trace.get("baseTimeNanoseconds", 0) / 1000
        events += [_shifted(event, since) for event in trace["traceEvents"]]
    times = [event["ts"] for event in events if "ts" in event and event.get("ph") == "X"]
    begun, ended = min(times), max(event["ts"] + event.get("dur", 0) for event in events if "ts" in event)
    phases = read_timeline(timeline)
    tracks = {event["tid"] for event in phases if begun <= event.get("ts", -1) <= ended}
    events += [
        event
        for event in phases
        if event["tid"] in tracks and (event["ph"] == "M" or begun <= event["ts"] <= ended)
    ]
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as file:
        json.dump({"traceEvents": [_shifted(event, -begun) for event in events]}, file)
    for part in parts:
        part.unlink()
    return len(parts)


def _shifted(event: dict[str, Any], since: float) -> dict[str, Any]:
    return event | {"ts": event["ts"] + since} if "ts" in event else event


def breakdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table of the seconds of each phase of a step.

    Args:
        rows: rows of metrics.jsonl. The value of a phase is the mean over the rows that have this phase.
    """
    rows = list(rows)
    lines = [f"{'Metric':<18} {'Value':<12} Unit"]
    for name, unit in PHASES.items():
        key = f"timing/{name}" if unit == "seconds" else f"{name}/mean"
        found = [row[key] for row in rows if row.get(key) is not None]
        if found:
            lines.append(f"{name:<18} {sum(found) / len(found):<12.6f} {unit}")
    return "\n".join(lines)
