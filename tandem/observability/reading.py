"""Read run folders of runs that may be running, ended, resumed or killed.

This module does not import torch and does not change the folder.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from tandem.errors import DataError
from tandem.observability.config_file import read_config
from tandem.observability.files import GrowingFile
from tandem.observability.inside import inside
from tandem.observability.lock import is_held
from tandem.texts import parse_json

State = Literal["running", "finished", "interrupted", "failed", "empty"]
STEP = "step"
FORMAT = 1
"""The version of the run folder's format. It increases when an older Tandem would misread new folders."""
LOCK = "run.lock"
METRICS: Mapping[str, Literal["max", "min"]] = {
    "reward/mean": "max",
    "rm/accuracy": "max",
    "sft/loss": "min",
}
"""A dict from the main metric of a type of run to whether larger or smaller values are better."""
SHOWN = (*METRICS, "val/accuracy", "val/loss")
"""The metrics that are shown first."""
PHASES = {
    **dict.fromkeys(("generate_sequences", "reshard", "gen", "reward", "old_log_prob", "ref"), "seconds"),
    **dict.fromkeys(("values", "adv", "update_critic", "update_actor", "step"), "seconds"),
    **{"response_length": "tokens", "save_checkpoint": "seconds"},
}
"""The metrics in tables of a step, including a critic's metrics, with their units."""
_TIMED = ("timing/step", "timing/testing", "timing/save_checkpoint")
_SAMPLES = re.compile(r"step_(\d+)(_val\d*)?\.parquet")
_CHECKPOINT = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, slots=True)
class Best:
    """The best step of a run.

    Attributes:
        step: the step with the best value; the first such step if several values are equal.
        metric: the metric that was compared.
        value: the metric's value at that step.
    """

    step: int
    metric: str
    value: float


class Run:
    """A run, read from its folder.

    Each property reads the folder again, so you can watch a running run through one object.

    Args:
        folder: the run folder.

    Attributes:
        path: the run folder.

    Raises:
        DataError: If the folder does not exist, or no run has started in it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        if not is_run(self.path):
            inside = [str(run.path) for run in find_runs(self.path)]
            raise DataError(
                "no run has started in this folder" if self.path.is_dir() else "the folder does not exist",
                field=str(folder),
                expected="a run folder" + (f", such as {', '.join(inside[:5])}" if inside else ""),
                remedy="run `tandem runs FOLDER` to list the runs under a folder",
            )
        self._metrics = GrowingLines(self.path / "metrics.jsonl", STEP, int, self.path)
        self._events = GrowingLines(self.path / "events.jsonl", "event", str, self.path)
        self._config: dict[str, Any] = {}
        self._config_written = 0

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.state} after step {self.steps})"

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config as nested dicts; empty while the run is still loading."""
        file = self.path / "config.yaml"
        try:
            written = file.stat().st_mtime_ns
            if written != self._config_written:
                self._config = read_config(file)
                self._config_written = written
        except FileNotFoundError:
            return {}
        return self._config

    def setting(self, key: str) -> Any:
        """Return the value of a dotted config key; None if the config has no such key.

        Raises:
            ConfigError: If the key refers to an environment variable that is not set.
        """
        found = self.written(key)
        if "${" in repr(found):  # imported late: the import takes long
            found = import_module("tandem.config.written").resolved(self.config, key)
        return found

    def written(self, key: str) -> Any:
        """Return the value of a key as written in the file, with references to environment variables."""
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict per step, in order: `step`, and metric names with floats; NaN if a value was not finite.

        If a step was repeated after a resume, its last row counts. Step 0 is the validation before training.

        Raises:
            DataError: If a complete line of metrics.jsonl is not a row of metrics.
        """
        return [
            {name: math.nan if value is None else value for name, value in row.items()}
            for row in self._rows()
        ]

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """Return the steps and finite values of a metric, in the order of the steps."""
        return [(row[STEP], row[metric]) for row in self._rows() if row.get(metric) is not None]

    def _rows(self) -> list[dict[str, Any]]:
        return by_step(self._metrics)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Starts, ends and warnings in their order, each with `event` and `time` (ISO 8601).

        A start also has `step`, `total_steps` and `format`; an end has `how`; a warning has `name`, `step`
        and `text`.

        Raises:
            DataError: If a line is not an event, or a later Tandem wrote the folder.
        """
        events = self._events.look()
        for event in events:
            if event.get("format", FORMAT) != FORMAT:
                raise DataError(
                    "another version of Tandem wrote the run folder; read it with that version",
                    field=str(self.path),
                    got=f"format {event['format']}",
                    expected=f"format {FORMAT}",
                )
        return events

    @property
    def steps(self) -> int:
        """The number of finished training steps."""
        return max((row[STEP] for row in self._metrics.look()), default=0)

    @property
    def total_steps(self) -> int | None:
        """The number of training steps of the whole run; None if it is unknown."""
        starts = [event["total_steps"] for event in self.events if event["event"] == "start"]
        total: int | None = starts[-1] if starts else self.setting("trainer.total_training_steps")
        return total

    @property
    def state(self) -> State:
        """Whether the run is running, or how it ended. A run that was killed counts as interrupted.

        A run without metrics and checkpoints is empty, unless it failed.
        """
        if is_held(self.path / LOCK, self.path):
            return "running"
        last = next((e for e in reversed(self.events) if e["event"] in ("start", "end")), None)
        if last is None:
            return self._state_without_events()
        how: State = last["how"] if last["event"] == "end" else "interrupted"
        return how if how == "failed" or self.steps or self.checkpoints else "empty"

    def _state_without_events(self) -> State:
        if not (self._metrics.look() or self.checkpoints):
            return "failed" if (self.path / "log" / "failure.txt").exists() else "empty"
        total = self.total_steps
        return "finished" if total is not None and self.steps >= total else "interrupted"

    @property
    def metric(self) -> str | None:
        """The main metric of this type of run, a key of `METRICS`; None before the first step."""
        rows = self._metrics.look()
        return next((name for name in METRICS if any(name in row for row in rows)), None)

    @property
    def best(self) -> Best | None:
        """The best step by `trainer.keep_best`, else by `metric`; None if there are no finite values."""
        name = self.setting("trainer.keep_best") or self.metric
        if name is None:
            return None
        curve = self.curve(name)
        step, value = (min if self.lower_is_better(name) else max)(
            curve, key=lambda point: point[1], default=(0, math.nan)
        )
        return Best(step, name, value) if curve else None

    def lower_is_better(self, metric: str) -> bool:
        """Return whether smaller values of a metric are better, by `trainer.keep_best_mode` or `METRICS`."""
        if metric == self.setting("trainer.keep_best"):
            return bool(self.setting("trainer.keep_best_mode") == "min")
        return METRICS.get(metric) == "min"

    @property
    def checkpoints(self) -> dict[int, Path]:
        """A dict from step to the folder of its complete checkpoint, sorted by step."""
        folder = self.path / "checkpoints"
        found = {
            int(match[1]): path
            for path in (folder.iterdir() if folder.is_dir() else ())
            if (match := _CHECKPOINT.fullmatch(path.name))
        }
        return dict(sorted(found.items()))

    def sample_steps(self, *, val: bool = False) -> list[int]:
        """Return the steps whose samples are in the folder, in order.

        Args:
            val: samples of validations instead of training.
        """
        return sorted({step for step, _ in self._sample_files(val)})

    def samples(
        self, step: int | None = None, *, val: bool = False, tokens: bool = False
    ) -> list[dict[str, Any]]:
        """Return the samples of a step, one dict per sample.

        A dict has `step`, `uid` (of the prompt), `sample` (the sample's number among the prompt's samples),
        `prompt` and `response` (texts), `score`, `extra` (a dict of the reward's other numbers), `why` (the
        reason for the score; "" if the reward gives no reason), `ground_truth`, `data_source`,
        `finish_reason`, `prompt_tokens` and `response_tokens` (counts).

        Args:
            step: the step; None: the last step with samples.
            val: samples of the validation after that step; step 0 is the validation before training.
            tokens: add the other columns of the file unchanged; columns per token are lists.

        Raises:
            DataError: If the run wrote no samples, or no samples of the given step.
        """
        files = self._sample_files(val)
        steps = sorted({number for number, _ in files})
        if not steps or (step is not None and step not in steps):
            raise self._no_samples(step, steps, val)
        wanted = steps[-1] if step is None else step
        read = import_module(
            "tandem.observability.sample_files"
        ).read  # slow to import, as it imports pyarrow
        return [
            {STEP: wanted, **row}
            for number, path in files
            if number == wanted
            for row in read(inside(path, self.path), tokens=tokens)
        ]

    def _sample_files(self, val: bool) -> list[tuple[int, Path]]:
        folder = self.path / "samples"
        return [
            (int(match[1]), path)
            for path in sorted(folder.iterdir() if folder.is_dir() else ())
            if (match := _SAMPLES.fullmatch(path.name)) and (match[2] is not None) == val
        ]

    def _no_samples(self, step: int | None, steps: list[int], val: bool) -> DataError:
        what = "validation samples" if val else "samples"
        field, expected = str(self.path), listed(steps)
        if steps:
            return DataError(f"there are no {what} of this step", field=field, got=step, expected=expected)
        freq = self.setting("trainer.samples_freq")
        if freq is None and self.config:  # supervised runs do not have this key
            return DataError(f"this kind of run writes no {what}", field=field)
        got = f"trainer.samples_freq={freq}, {self.steps} steps done"
        more = "data.val_files, trainer.test_freq and " if val else ""
        remedy = f"set {more}trainer.samples_freq=1 to write them"
        return DataError(f"the run has written no {what}", field=field, got=got, remedy=remedy)

    @property
    def seconds(self) -> float:
        """The time of all steps, validations and checkpoints, over all starts of the run, in seconds."""
        return sum(row.get(name) or 0.0 for row in self._rows() for name in _TIMED)

    @property
    def bytes(self) -> int:
        """The size of all files in the folder, in bytes."""
        return bytes_below(self.path)


class GrowingLines:
    """A reader of the JSON objects of a file of lines that may grow or be rewritten between calls.

    Args:
        path: the file; it may not exist yet.
        key: a key that every object has.
        kind: the type of the value of `key`.
        folder: the folder that must contain the file; None: any folder.
    """

    def __init__(self, path: Path, key: str, kind: type, folder: Path | None = None) -> None:
        self._path, self._key, self._kind, self._folder = path, key, kind, folder
        self._begin()

    def _begin(self) -> None:
        self._file = GrowingFile(self._path, folder=self._folder)
        self._found: list[dict[str, Any]] = []

    def look(self) -> list[dict[str, Any]]:
        """Return the objects of all complete lines so far, in order. Only new lines are read.

        Raises:
            DataError: If a complete line is not an object with `key`.
        """
        rewritten, lines = self._file.look()
        if rewritten:  # a resumed run rewrote the file
            self._found = []
        first = len(self._found) + 1
        try:
            self._found += [self._parsed(line, number) for number, line in enumerate(lines, first)]
        except DataError:
            self._begin()  # so that the next call finds the error too
            raise
        return list(self._found)

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            found: dict[str, Any] = parse_json(line)
            if not isinstance(found[self._key], self._kind):
                raise TypeError(f"{self._key} is not of type {self._kind.__name__}")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataError(
                f"line {number} does not belong in this file",
                field=str(self._path),
                got=line[:80].decode(errors="replace"),
                expected=f'{{"{self._key}": …, …}}',
                remedy="remove that line",
            ) from error
        return found


def by_step(lines: GrowingLines) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl sorted by step, with only the last row of each step."""
    rows = {row[STEP]: row for row in lines.look()}
    return [rows[step] for step in sorted(rows)]


def is_run(folder: Path) -> bool:
    """Return whether a run has started in the folder."""
    return (folder / "metrics.jsonl").is_file() or all(
        (folder / part).is_dir() for part in ("samples", "log")
    )


def find_runs(folder: str | Path) -> list[Run]:
    """Return the runs under a folder, sorted by path; links and folders inside a run are not searched."""
    found: list[Run] = []
    for path, below, _ in os.walk(folder):
        if is_run(Path(path)):
            found.append(Run(path))
            below.clear()
        below.sort()
    return found


def bytes_below(folder: Path) -> int:
    """Return the size of all files below a folder, in bytes, except files that are deleted meanwhile."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue
    return total


def listed(steps: list[int]) -> str:
    """Return steps as a short text: 1, 2, 3, 4 … 49, 50."""
    texts = [str(step) for step in steps]
    return ", ".join(texts) if len(texts) <= 8 else f"{', '.join(texts[:4])} … {', '.join(texts[-2:])}"
