"""A run folder as those see it who only read: alive or ended, resumed, half-written. Nothing here imports
torch, and nothing is changed in the folder."""

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
"""Of the run folder. It grows when folders hold what an earlier Tandem would misread."""
LOCK = "run.lock"
METRICS: Mapping[str, Literal["max", "min"]] = {
    "reward/mean": "max",
    "rm/accuracy": "max",
    "sft/loss": "min",
}
"""What a kind of run is judged by, and which way is better."""
SHOWN = (*METRICS, "val/accuracy", "val/loss")
"""What people are told of a run first."""
PHASES = {
    **dict.fromkeys(("generate_sequences", "reshard", "gen", "reward", "old_log_prob", "ref"), "seconds"),
    **dict.fromkeys(("values", "adv", "update_critic", "update_actor", "step"), "seconds"),
    **{"response_length": "tokens", "save_checkpoint": "seconds"},
}
"""The rows of the users' tables of a step, and a critic's, with their units."""
_TIMED = ("timing/step", "timing/testing", "timing/save_checkpoint")
_SAMPLES = re.compile(r"step_(\d+)(_val\d*)?\.parquet")
_CHECKPOINT = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, slots=True)
class Best:
    """The best step of a run.

    Attributes:
        step: its number; the first of equals.
        metric: what was compared.
        value: of the metric at that step.
    """

    step: int
    metric: str
    value: float


class Run:
    """A run, read from its folder. Each property looks at the folder anew, so that a living run may be
    watched through one object; metrics are read on from where the last look ended.

    Args:
        folder: the run folder.

    Attributes:
        path: the run folder.

    Raises:
        DataError: no such folder, or no run has begun in it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        if not is_run(self.path):
            inside = [str(run.path) for run in find_runs(self.path)]
            raise DataError(
                "no run has begun in this folder" if self.path.is_dir() else "no such folder",
                field=str(folder),
                expected="a run folder" + (f", such as {', '.join(inside[:5])}" if inside else ""),
                remedy="`tandem runs FOLDER` lists the runs under a folder",
            )
        self._metrics = GrowingLines(self.path / "metrics.jsonl", STEP, int, self.path)
        self._events = GrowingLines(self.path / "events.jsonl", "event", str, self.path)
        self._config: dict[str, Any] = {}
        self._config_written = 0

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.state} after step {self.steps})"

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config as nested plain values; empty while the run is still loading."""
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
        """The value of a dotted config key; None where the config has no such key.

        Raises:
            ConfigError: the key refers to a variable of the environment that is not set.
        """
        found = self.written(key)
        if "${" in repr(found):  # what resolves it takes long to import
            found = import_module("tandem.config.written").resolved(self.config, key)
        return found

    def written(self, key: str) -> Any:
        """The same as the file has it: what came from the environment is a reference."""
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A row for each step in their order: `step` and floats by the metric's name, NaN where a value was
        not finite. Of a step that was done again after a resume, the last row. A row of step 0 holds the
        validation before training.

        Raises:
            DataError: a whole line of metrics.jsonl is no row of metrics.
        """
        return [
            {name: math.nan if value is None else value for name, value in row.items()}
            for row in self._rows()
        ]

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """Steps and finite values of one metric, in the order of the steps."""
        return [(row[STEP], row[metric]) for row in self._rows() if row.get(metric) is not None]

    def _rows(self) -> list[dict[str, Any]]:
        return by_step(self._metrics)

    @property
    def events(self) -> list[dict[str, Any]]:
        """Starts, ends and warnings in the order in which they came: `event`, `time` (ISO 8601), and with a
        start `step`, `total_steps` and `format`, with an end `how`, with a warning `name`, `step` and `text`.

        Raises:
            DataError: a line is no event; a later Tandem wrote the folder.
        """
        events = self._events.look()
        for event in events:
            if event.get("format", FORMAT) != FORMAT:
                raise DataError(
                    "the run folder is of another version, which the Tandem that wrote it reads",
                    field=str(self.path),
                    got=f"format {event['format']}",
                    expected=f"format {FORMAT}",
                )
        return events

    @property
    def steps(self) -> int:
        """Training steps done."""
        return max((row[STEP] for row in self._metrics.look()), default=0)

    @property
    def total_steps(self) -> int | None:
        """Training steps of the whole run; None where nobody has said."""
        starts = [event["total_steps"] for event in self.events if event["event"] == "start"]
        total: int | None = starts[-1] if starts else self.setting("trainer.total_training_steps")
        return total

    @property
    def state(self) -> State:
        """Whether the run is alive, and else how it ended. A run that was killed counts as interrupted; one
        that left neither a metric nor a checkpoint is empty, unless it failed."""
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
        """The metric that a run of this kind is judged by, a key of `METRICS`; None before the first step."""
        rows = self._metrics.look()
        return next((name for name in METRICS if any(name in row for row in rows)), None)

    @property
    def best(self) -> Best | None:
        """The best step, by `trainer.keep_best` where the config names it, else by `metric`; None where no
        step has a finite value of it."""
        name = self.setting("trainer.keep_best") or self.metric
        if name is None:
            return None
        curve = self.curve(name)
        step, value = (min if self.lower_is_better(name) else max)(
            curve, key=lambda point: point[1], default=(0, math.nan)
        )
        return Best(step, name, value) if curve else None

    def lower_is_better(self, metric: str) -> bool:
        """Whether the least of a metric is the best: by what the config says of it, else by `METRICS`."""
        if metric == self.setting("trainer.keep_best"):
            return bool(self.setting("trainer.keep_best_mode") == "min")
        return METRICS.get(metric) == "min"

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The folders of whole checkpoints by step, in their order."""
        folder = self.path / "checkpoints"
        found = {
            int(match[1]): path
            for path in (folder.iterdir() if folder.is_dir() else ())
            if (match := _CHECKPOINT.fullmatch(path.name))
        }
        return dict(sorted(found.items()))

    def sample_steps(self, *, val: bool = False) -> list[int]:
        """The steps whose samples are in the folder, in their order.

        Args:
            val: of validations.
        """
        return sorted({step for step, _ in self._sample_files(val)})

    def samples(
        self, step: int | None = None, *, val: bool = False, tokens: bool = False
    ) -> list[dict[str, Any]]:
        """What the policy wrote at a step, one dict a sample: `step`, `uid` (of the prompt), `sample` (its
        number among the prompt's), `prompt` and `response` (texts), `score`, `extra` (further numbers of the
        reward, by name), `why` (what the score is for; "" where the reward does not say), `ground_truth`,
        `data_source`, `finish_reason`, `prompt_tokens`, `response_tokens` (counts).

        Args:
            step: the last one written, where none is given.
            val: of the validation after that step, 0 for the one before training.
            tokens: add the other columns of the file as they are, those by token as lists.

        Raises:
            DataError: the run wrote none, or none of that step.
        """
        files = self._sample_files(val)
        steps = sorted({number for number, _ in files})
        if not steps or (step is not None and step not in steps):
            raise self._no_samples(step, steps, val)
        wanted = steps[-1] if step is None else step
        read = import_module("tandem.observability.sample_files").read  # it imports pyarrow, which takes long
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
            return DataError(f"no {what} of this step", field=field, got=step, expected=expected)
        freq = self.setting("trainer.samples_freq")
        if freq is None and self.config:  # supervised runs have no such key
            return DataError(f"this run writes no {what}", field=field)
        got = f"trainer.samples_freq={freq}, {self.steps} steps done"
        more = "data.val_files, trainer.test_freq and " if val else ""
        remedy = f"with {more}trainer.samples_freq=1 a run writes them"
        return DataError(f"the run has written no {what}", field=field, got=got, remedy=remedy)

    @property
    def seconds(self) -> float:
        """Seconds that steps, validations and checkpoints took, over all starts of the run."""
        return sum(row.get(name) or 0.0 for row in self._rows() for name in _TIMED)

    @property
    def bytes(self) -> int:
        """Bytes of all files in the folder."""
        return bytes_below(self.path)


class GrowingLines:
    """The JSON objects of a file of lines that grows, or is written anew, between two looks.

    Args:
        path: the file; it may come later.
        key, kind: what every object has, and of which type that is.
        folder: within which the file must lie; None: anywhere.
    """

    def __init__(self, path: Path, key: str, kind: type, folder: Path | None = None) -> None:
        self._path, self._key, self._kind, self._folder = path, key, kind, folder
        self._begin()

    def _begin(self) -> None:
        self._file = GrowingFile(self._path, folder=self._folder)
        self._found: list[dict[str, Any]] = []

    def look(self) -> list[dict[str, Any]]:
        """The objects of all whole lines up to now, in their order; only what is new is read. A last line
        without its end is left for the next time.

        Raises:
            DataError: a whole line is not such an object.
        """
        anew, lines = self._file.look()
        if anew:  # a resumed run wrote it anew
            self._found = []
        first = len(self._found) + 1
        try:
            self._found += [self._parsed(line, number) for number, line in enumerate(lines, first)]
        except DataError:
            self._begin()  # to be found at the next look too
            raise
        return list(self._found)

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            found: dict[str, Any] = parse_json(line)
            if not isinstance(found[self._key], self._kind):
                raise TypeError(f"{self._key} is not of type {self._kind.__name__}")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataError(
                f"line {number} is not what this file holds",
                field=str(self._path),
                got=line[:80].decode(errors="replace"),
                expected=f'{{"{self._key}": …, …}}',
                remedy="remove that line",
            ) from error
        return found


def by_step(lines: GrowingLines) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl in the order of their steps; of a step's rows the last wins."""
    rows = {row[STEP]: row for row in lines.look()}
    return [rows[step] for step in sorted(rows)]


def is_run(folder: Path) -> bool:
    """Whether a run has begun in the folder."""
    return (folder / "metrics.jsonl").is_file() or all(
        (folder / part).is_dir() for part in ("samples", "log")
    )


def find_runs(folder: str | Path) -> list[Run]:
    """The runs under a folder, itself included, by path. Links are not followed, and no run is sought within
    another."""
    found: list[Run] = []
    for path, below, _ in os.walk(folder):
        if is_run(Path(path)):
            found.append(Run(path))
            below.clear()
        below.sort()
    return found


def bytes_below(folder: Path) -> int:
    """Bytes of all files below; a file that goes meanwhile does not count."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue
    return total


def listed(steps: list[int]) -> str:
    """Steps as people write them: 1, 2, 3 … 50."""
    texts = [str(step) for step in steps]
    return ", ".join(texts) if len(texts) <= 8 else f"{', '.join(texts[:4])} … {', '.join(texts[-2:])}"
