"""The runs that the page shows. New runs are added, and new data of a run is read as the run grows."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from tandem.errors import DataError, TandemError
from tandem.observability.config_file import flat
from tandem.observability.reading import Run, find_runs
from tandem.viewer.index import UNREADABLE, SampleIndex
from tandem.viewer.timeline import Phases

LOOK_S = 1.0  # seconds between two checks for new files of samples
SEARCH_S = 5.0  # seconds between two searches for new runs
KEYS = 10_000  # most keys of a config; YAML aliases can make a small file endless, so more are refused
_LONGEST = 2_000  # characters of a key's value


class Viewed:
    """A run with a lock, because the objects that read the run are not thread-safe."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.name = str(run.path)
        self.lock = threading.RLock()
        self.samples = SampleIndex(run.path)
        self.phases = Phases(run.path)

    def config(self) -> dict[str, Any]:
        """Return the config as a dict from dotted key to value.

        Raises:
            DataError: the config has too many keys.
        """
        keys = dict(islice(flat(self.run.config), KEYS + 1))
        if len(keys) > KEYS:
            raise DataError(f"more than {KEYS:,} keys", field=str(self.run.path / "config.yaml"))
        return {name[:_LONGEST]: _beginning(value) for name, value in keys.items()}

    def summary(self) -> dict[str, Any]:
        """Return the entry of the run in the list of runs.

        `stamp` changes when there is something new to show.
        """
        run, indexed = self.run, self.samples.indexed
        facts = {"run": self.name, "files": self.samples.files, "indexed": indexed}
        try:
            curve = run.curve(run.metric) if run.metric else []
            return facts | {
                "state": run.state,
                "steps": run.steps,
                "total": run.total_steps,
                "metric": run.metric,
                "last": curve[-1][1] if curve else None,
                "algorithm": _beginning(run.written("algorithm.adv_estimator")),
                "stamp": [len(run.curve("step")), len(run.events), indexed, len(run.checkpoints)],
            }
        except (TandemError, *UNREADABLE) as error:
            return facts | {"state": "unreadable", "error": str(error)[:_LONGEST], "stamp": [indexed]}


def _beginning(value: Any) -> Any:
    """Return a value; if its JSON text is long, return only the start of the text."""
    text = ""
    for piece in json.JSONEncoder(ensure_ascii=False, default=str).iterencode(value):
        text += piece
        if len(text) > _LONGEST:
            return f"{text[:_LONGEST]}…"
    return value


class Shelf:
    """All runs in some folders.

    Args:
        folders: run folders, or folders with runs anywhere below.

    Raises:
        DataError: a folder does not exist.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = list(folders)
        for folder in self._folders:
            if not folder.is_dir():
                raise DataError(
                    "no such folder",
                    field=str(folder),
                    remedy="give a run folder, or a folder that contains runs",
                )
        self._found: dict[str, Viewed] = {}
        self._searched = -SEARCH_S
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._reader = threading.Thread(target=self._read_on, name="samples", daemon=True)

    def __enter__(self) -> Shelf:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._reader.join()

    def runs(self) -> list[Viewed]:
        """Return the runs that exist now, sorted by name."""
        with self._lock:
            if time.monotonic() - self._searched > SEARCH_S:
                there = {str(run.path): run for folder in self._folders for run in find_runs(folder)}
                self._found = {name: self._found.get(name) or Viewed(there[name]) for name in sorted(there)}
                self._searched = time.monotonic()
            return list(self._found.values())

    def get(self, name: str) -> Viewed:
        """Return a run by its name.

        Raises:
            DataError: there is no run with this name.
        """
        runs = {view.name: view for view in self.runs()}
        if name not in runs:
            raise DataError("there is no such run", field="run", got=name, expected=", ".join(runs)[:500])
        return runs[name]

    def _read_on(self) -> None:
        """Read new files of samples into the indices; release the locks between two files."""
        while True:
            for view in self.runs():
                with view.lock:
                    pending = view.samples.pending()
                for path in pending:
                    if self._stop.is_set():
                        return
                    with view.lock:
                        view.samples.read(path)
            if self._stop.wait(LOOK_S):
                return
