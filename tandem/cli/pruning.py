"""Find and delete checkpoints and run folders that are no longer needed."""

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
    """A folder that may be deleted.

    Attributes:
        path: the folder.
        run: the run folder, which may be the same folder.
        why: the reason why the folder may be deleted.
        bytes: size of all files in the folder.
    """

    path: Path
    run: Path
    why: str
    bytes: int


def doomed(run: Run) -> list[Doomed]:
    """Return the folders of a run that may be deleted.

    For a run without results, this is the run folder. For other runs, these are all checkpoints except the
    newest complete checkpoint and the best checkpoint. The result is empty if the run is running or has no
    complete checkpoint.

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
    why = f"not the newest checkpoint (step {newest})" + ("" if len(kept) == 1 else ", nor the best")
    return [
        Doomed(path, run.path, why, bytes_below(path))
        for step, path in checkpoints.items()
        if newest is not None and step not in kept
    ]


def remove(each: Doomed) -> None:
    """Delete a folder. During the deletion, the run is locked.

    Raises:
        ConfigError: a process writes to the run folder.
    """
    with ProcessLock(each.run / LOCK, str(each.run), say):
        last = each.path.with_name(
            f"{each.path.name}.tmp"
        )  # so that a half-deleted checkpoint never counts as complete
        each.path.rename(last)
        shutil.rmtree(last)


def _best(run: Run) -> int | None:
    """Return the step of the best checkpoint; None if no checkpoint has the metric."""
    best = run.best
    if best is None:
        return None
    values = {step: value for step, value in run.curve(best.metric) if step in run.checkpoints}
    pick = min if run.lower_is_better(best.metric) else max
    return pick(values, key=lambda step: values[step], default=None)


def _is_whole(checkpoint: Path) -> bool:
    """Return whether the checkpoint has all files of its manifest, with the right sizes."""
    try:
        with opened(checkpoint / "manifest.json", checkpoint) as file:
            files = parse_json(file.read())["files"]
        return all((checkpoint / name).stat().st_size == files[name]["bytes"] for name in files)
    except (OSError, ValueError, KeyError, TypeError):  # DataError is a ValueError
        return False
