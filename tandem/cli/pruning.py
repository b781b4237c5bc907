"""What of a run folder may be deleted, and its deletion."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tandem.observability.inside import opened, require_inside
from tandem.observability.lock import ProcessLock
from tandem.observability.reading import LOCK, Run, bytes_below
from tandem.observability.terminal import say
from tandem.texts import parse_json

_OF_AN_EMPTY_RUN = {
    "config.yaml",
    "config.yaml.sig",
    "events.jsonl",
    "timeline.json",
    "tensorboard",
    "samples",
    "checkpoints",
    "log",
}


@dataclass(frozen=True, slots=True)
class Doomed:
    """A folder that may go.

    Attributes:
        path: the folder.
        run: the run's, which may be the same.
        why: it may go.
        bytes: of all files in it.
    """

    path: Path
    run: Path
    why: str
    bytes: int


def doomed(run: Run) -> list[Doomed]:
    """What may go of a run: the run, if it did nothing; else all checkpoints but the newest whole one and the
    best. None of a run that is running, or has no whole checkpoint.

    Raises:
        DataError: the run's metrics cannot be read.
    """
    if run.state == "running":
        return []
    if run.state == "empty" and {path.name for path in run.path.iterdir()} <= _OF_AN_EMPTY_RUN:
        return [Doomed(run.path, run.path, "a run that did nothing", run.bytes)]
    checkpoints = run.checkpoints
    for path in checkpoints.values():
        require_inside(path, run.path)
    newest = next((step for step in sorted(checkpoints, reverse=True) if _is_whole(checkpoints[step])), None)
    kept = {newest, _best(run)}
    why = f"not the newest, {newest}" + ("" if len(kept) == 1 else ", nor the best")
    return [
        Doomed(path, run.path, why, bytes_below(path))
        for step, path in checkpoints.items()
        if newest is not None and step not in kept
    ]


def remove(each: Doomed) -> None:
    """Deletes a folder while nobody else may begin to write in its run.

    Raises:
        ConfigError: somebody does.
    """
    with ProcessLock(each.run / LOCK, str(each.run), say):
        last = each.path.with_name(f"{each.path.name}.tmp")  # a half-deleted one is never taken for whole
        each.path.rename(last)
        shutil.rmtree(last)


def _best(run: Run) -> int | None:
    """The step of the best checkpoint; None where none of them has a value."""
    best = run.best
    if best is None:
        return None
    values = {step: value for step, value in run.curve(best.metric) if step in run.checkpoints}
    pick = min if run.lower_is_better(best.metric) else max
    return pick(values, key=lambda step: values[step], default=None)


def _is_whole(checkpoint: Path) -> bool:
    """Whether all files are there that were written, at their sizes."""
    try:
        with opened(checkpoint / "manifest.json", checkpoint) as file:
            files = parse_json(file.read())["files"]
        return all((checkpoint / name).stat().st_size == files[name]["bytes"] for name in files)
    except (OSError, ValueError, KeyError, TypeError):  # ValueError: a DataError too
        return False
