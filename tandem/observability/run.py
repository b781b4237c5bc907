"""The run folder: all files of a run. They are readable during the run and after a crash.

config.yaml                 the resolved config; values from the environment are references to variables
metrics.jsonl               one JSON object per step; append-only
events.jsonl                one JSON object per start, end and warning of the run; append-only
samples/step_NNNNNN.parquet the policy's responses at that step, token by token
timeline.json               phases as a Chrome trace
checkpoints/                written by the checkpoint manager
log/run.log                 the messages of the run
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from tandem.errors import DataError, file_errors
from tandem.hidden import masked
from tandem.observability.files import append_line, replace_file
from tandem.observability.reading import STEP, GrowingLines, by_step
from tandem.observability.sample_files import conversation
from tandem.observability.sinks.base import Generation
from tandem.protocol import DataProto, Ragged
from tandem.texts import parse_json
from tandem.trusted import sign

KIND = b"kind"
"""The metadata key for the type of values of a column in a samples file.

The types are: numbers per token (ragged), numbers per sample (dense), or one Python value per sample, stored
unchanged (plain) or as JSON (json).
"""
SampleColumn = Ragged | Tensor | np.ndarray | Sequence[Any]

_CONTENTS = (
    "config.yaml",
    "config.yaml.sig",
    "metrics.jsonl",
    "events.jsonl",
    "samples",
    "timeline.json",
    "tensorboard",
    "checkpoints",
    "log",
)


class RunFolder:
    """The writer of a run's folder. A missing folder is created; an existing folder is not changed.

    Args:
        path: the run's folder.

    Attributes:
        path: the run's folder.
        config_file: config.yaml.
        metrics_file: metrics.jsonl.
        events_file: events.jsonl.
        timeline_file: timeline.json.
        samples: the folder of samples.
        checkpoints: the folder of checkpoints.
        logs: the folder of logs.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.events_file = self.path / "events.jsonl"
        self.timeline_file = self.path / "timeline.json"
        self.samples = self.path / "samples"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "log"
        self.samples.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(exist_ok=True)

    def write_config(self, yaml: str) -> None:
        """Write the config and its signature.

        With the signature, Tandem may run code that the config names when the same user reads the folder
        later.
        """
        replace_file(self.config_file, yaml.encode())
        sign(self.config_file)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line of metrics. The line is on disk when this returns.

        NaN and infinities become null, because JSON has no numbers for them.
        """
        numbers = {name: float(value) for name, value in metrics.items()}
        finite = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
        append_line(self.metrics_file, json.dumps({"step": step} | finite, allow_nan=False), durable=True)

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line about an event of the run, with the time.

        Args:
            kind: "start", "end" or "warning".
            **fields: JSON values.
        """
        now = datetime.now().isoformat(timespec="seconds")
        line = json.dumps({"event": kind, "time": now, **fields})
        append_line(self.events_file, masked(line), durable=True)

    def write_samples(self, step: int, table: Mapping[str, SampleColumn], *, part: str = "") -> Path:
        """Write one row per sample. An existing file is replaced.

        Args:
            step: the step.
            table: a dict from column name to B entries: numbers, texts or bools; a `Ragged` or a list of rows
                for columns per token. Dicts, and values of mixed types, are stored as JSON text.
            part: distinguishes several files of one step.

        Raises:
            DataError: If columns have different lengths.
        """
        lengths = {name: len(column) for name, column in table.items()}
        if len(set(lengths.values())) > 1:
            raise DataError("sample columns have different lengths", got=lengths, expected="one length")
        path = self.samples / f"step_{step:06d}{'_' if part else ''}{part}.parquet"
        partial = path.with_suffix(".partial")
        fields, arrays = [], []
        for name, column in table.items():
            kind, array = _arrow(column)
            fields.append(pa.field(name, array.type, metadata={KIND: kind}))
            arrays.append(array)
        with file_errors(path):
            pq.write_table(pa.Table.from_arrays(arrays, schema=pa.schema(fields)), partial)
            partial.replace(path)
        return path

    def generations(self, step: int, count: int) -> list[Generation]:
        """Return the first `count` responses of the validation after a step, read from this folder."""
        found: list[Generation] = []
        for path in sorted(self.samples.glob(f"step_{step:06d}_val*.parquet")):
            if len(found) < count:
                columns = ["messages", "response_text", "scores"]
                rows = next(pq.ParquetFile(path).iter_batches(count - len(found), columns=columns))
                found += [
                    Generation(conversation(row["messages"]), row["response_text"], row["scores"])
                    for row in rows.to_pylist()
                ]
        return found

    def log(self, message: str) -> None:
        """Append a message of the run, with the time, to log/run.log."""
        now = datetime.now().isoformat(timespec="seconds")
        append_line(self.logs / "run.log", f"{now} {masked(message)}")

    def trim_after(self, step: int) -> None:
        """Delete the records after a checkpoint's step, and incomplete last lines, which a crash may leave.

        With step -1, delete all records. Otherwise a resumed run would have some steps twice.
        """
        if self.metrics_file.exists():
            kept = [row for row in read_metrics(self.metrics_file) if row["step"] <= step]
            replace_file(self.metrics_file, "".join(json.dumps(row) + "\n" for row in kept).encode())
        for path in self.samples.glob("step_*"):
            if path.suffix == ".partial" or int(path.stem.split("_")[1]) > step:
                path.unlink()

    def move_to_earlier(self, paths: Iterable[Path]) -> Path:
        """Move files that must not be overwritten into a new folder `earlier/NNN`, and return that folder."""
        earlier = self.path / "earlier"
        earlier.mkdir(exist_ok=True)
        numbers = [int(path.name) for path in earlier.iterdir() if path.name.isdigit()]
        target = earlier / f"{max(numbers, default=-1) + 1:03d}"
        target.mkdir()
        for path in paths:
            path.rename(target / path.name)
        return target

    def set_aside(self) -> Path | None:
        """Move the files of an earlier run into a new folder `earlier/NNN`. Other files stay.

        Returns:
            The new folder; None if there was no earlier run.
        """
        if not (self.metrics_file.exists() or any(self.samples.iterdir()) or _has_entries(self.checkpoints)):
            return None
        found = [self.path / name for name in _CONTENTS]
        target = self.move_to_earlier(path for path in found if path.exists())
        for folder in (self.samples, self.checkpoints, self.logs):
            folder.mkdir(exist_ok=True)
        return target

    def remove_if_unused(self) -> None:
        """Remove the folder if it only has the start of the timeline."""
        folders = (self.samples, self.logs, self.checkpoints)
        if not (self.config_file.exists() or any(map(_has_entries, folders))):
            self.timeline_file.unlink(missing_ok=True)
            for folder in (*folders, self.path):
                if folder.is_dir() and not _has_entries(folder):
                    folder.rmdir()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file; see `by_step`.

    A last line without a line end (from a write in progress, or a crash) is ignored.

    Raises:
        DataError: If any other line is not a JSON object with a step.
    """
    return by_step(GrowingLines(Path(path), STEP, int))


def read_samples(path: str | Path) -> dict[str, list[Any]]:
    """Return the columns of one samples file as Python values."""
    columns: dict[str, list[Any]] = pq.read_table(path).to_pydict()
    return columns


def read_batch(path: str | Path) -> DataProto:
    """Return the batch from which a samples file was written, bit for bit.

    Raises:
        DataError: If the file is damaged, or an earlier version wrote it without the types of its columns.
    """
    try:
        table = pq.read_table(path).combine_chunks()
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            "this samples file cannot be read", field=str(path), got=str(error).splitlines()[0]
        ) from error
    tensors: dict[str, Ragged | Tensor] = {}
    arrays: dict[str, list[Any]] = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        kind = (field.metadata or {}).get(KIND)
        if kind is None:
            message = "these samples are from an earlier version, so a run cannot train on them again"
            raise DataError(message, field=str(path), got=field.name)
        array = column.chunk(0)
        if kind == b"ragged":
            lengths = torch.from_numpy(array.value_lengths().to_numpy().copy())
            values, shape = array.flatten(), []
            while pa.types.is_fixed_size_list(values.type):
                shape.append(values.type.list_size)
                values = values.flatten()
            values = values.to_numpy(zero_copy_only=False).reshape(-1, *shape)
            tensors[field.name] = Ragged.from_lengths(torch.from_numpy(values.copy()), lengths)
        elif kind == b"dense":
            rows = (
                array.to_pylist() if pa.types.is_nested(array.type) else array.to_numpy(zero_copy_only=False)
            )
            tensors[field.name] = torch.from_numpy(np.array(rows))
        else:
            arrays[field.name] = [parse_json(e) if kind == b"json" else e for e in array.to_pylist()]
    return DataProto(tensors, arrays)


def _has_entries(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _arrow(column: SampleColumn) -> tuple[str, pa.Array]:
    """Return the type of the column's values (see `_KIND`), and the column as an Arrow array."""
    if isinstance(column, Ragged):
        values = pa.array(column.values.detach().cpu().flatten().numpy())
        for size in reversed(column.values.shape[1:]):
            values = pa.FixedSizeListArray.from_arrays(values, size)
        return "ragged", pa.LargeListArray.from_arrays(column.offsets.numpy(), values)
    kind = "plain"
    if isinstance(column, Tensor):
        kind, column = "dense", column.detach().cpu().numpy()
    if isinstance(column, np.ndarray) and column.ndim > 1:
        column = list(column)
    if any(isinstance(entry, Mapping) for entry in column):
        return "json", _json_column(column)
    try:
        return kind, pa.array(column)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return "json", _json_column(column)


def _json_column(column: Sequence[Any] | np.ndarray) -> pa.Array:
    return pa.array([json.dumps(entry, ensure_ascii=False, default=str) for entry in column])
