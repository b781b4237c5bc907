"""Reads parquet, Arrow, JSON and CSV files, and tasks, into one table; every error names the file."""

from __future__ import annotations

import difflib
import gzip
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pa_parquet

from tandem.errors import DataError
from tandem.tasks import is_task, parse

CHUNK_ROWS = 1024
ARROW, CSV, JSON, LINES, PARQUET = "Arrow", "CSV", "JSON", "JSON-lines", "parquet"
FORMATS = {".arrow": ARROW, ".feather": ARROW, ".csv": CSV, ".json": JSON, ".jsonl": LINES}
"""By the file's ending, before `.gz`; others are parquet. A JSON file is a list, or has a row per line."""
_ARROW_FILE = b"ARROW1"
_UNREADABLE = (OSError, EOFError, ValueError, OverflowError, RecursionError, pa.ArrowException)
JSON_BLOCK_BYTES = 64 << 20
"""The longest line of a JSON-lines file; Arrow's default, 1 MiB, is less than a long conversation."""


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The rows of all files below each other.

    Attributes:
        table: the columns asked for, as far as they exist.
        paths: one per file.
        starts: the number in the table of each file's first row.
    """

    table: pa.Table
    paths: tuple[Path, ...]
    starts: tuple[int, ...]

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def columns(self) -> list[str]:
        return list(self.table.column_names)

    def where(self, row: int) -> str:
        """A row's name in messages: its number in its file, and the file if there are several."""
        place = bisect_right(self.starts, row) - 1
        file = f"{self.paths[place].name} " if len(self.paths) > 1 else ""
        return f"{file}row {row - self.starts[place]}"

    @property
    def names(self) -> str:
        """The files, for messages."""
        return ", ".join(map(str, self.paths))

    def records(self, columns: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number, row as Python objects) of every row, converted a chunk at a time."""
        table = self.table if columns is None else self.table.select(list(columns))
        for start in range(0, len(self), CHUNK_ROWS):
            yield from enumerate(table.slice(start, CHUNK_ROWS).to_pylist(), start)

    def take(self, rows: Sequence[int] | np.ndarray) -> list[dict[str, Any]]:
        """The rows of these numbers, in that order."""
        taken: list[dict[str, Any]] = self.table.take(pa.array(rows, pa.int64())).to_pylist()
        return taken


def read_files(
    files: str | Sequence[str],
    *alternatives: Sequence[str],
    optional: Sequence[str] | None = (),
    max_samples: int = -1,
    keys: Sequence[str] = (),
) -> DataFiles:
    """Reads the columns of the first alternative that all files have.

    Args:
        files: one path or several, or tasks (see `tandem.tasks`), of the formats in `FORMATS`.
        alternatives: sets of columns, one of which must be there.
        optional: further columns, read where they are there; None: all others.
        max_samples: keep the first so many rows of all files together; -1 keeps all.
        keys: config keys that name the columns, for messages.

    Raises:
        DataError: no file is named; max_samples is out of range; a file is missing, unreadable, empty or
            lacks columns; two files have different types in one column.
    """
    paths = [Path(file).expanduser() for file in ([files] if isinstance(files, str) else files)]
    if not paths:
        raise DataError("no data file is named", field="files", expected="at least one path")
    if max_samples < -1 or max_samples == 0:
        raise DataError("out of range", field="max_samples", got=max_samples, expected="-1 (all) or >= 1")
    there = [_open(path) for path in paths]
    wanted = _shared_columns(there, alternatives, keys)
    names = None if optional is None else list(dict.fromkeys([*wanted, *optional]))
    tables = [_read(file, file.columns if names is None else names) for file in there]
    starts = [0]
    for table in tables[:-1]:
        starts.append(starts[-1] + table.num_rows)
    try:
        whole = pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(
            "the files have different types in one column",
            field=", ".join(map(str, paths)),
            got=error,
            expected="columns of the same names to have the same types",
            remedy="write the files anew with equal types, or train on one of them",
        ) from error
    if max_samples > 0:
        whole = whole.slice(0, max_samples)
    # One chunk per column: taking rows out of many chunks would copy the whole column each time.
    return DataFiles(whole.combine_chunks(), tuple(paths), tuple(starts))


def count_rows(files: Sequence[str], max_samples: int = -1) -> int:
    """The rows of data files, from their footers or by their lines.

    Args:
        max_samples: so many at most; -1: all.

    Raises:
        DataError: one cannot be read.
    """
    rows = 0
    for path in (Path(file).expanduser() for file in files):
        try:
            if is_task(str(path)):
                rows += parse(str(path)).size
            elif format_of(path) == PARQUET:
                rows += pa_parquet.read_metadata(path).num_rows
            elif format_of(path) == LINES:
                with opened(path) as lines:
                    rows += sum(1 for line in lines if line.strip())
            else:
                rows += _whole(path).num_rows
        except _UNREADABLE as error:
            raise _unreadable(path, error) from error
    return min(rows, max_samples) if max_samples > 0 else rows


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    columns: list[str]
    read: Callable[[list[str]], pa.Table]


def _open(path: Path) -> _File:
    if is_task(str(path)):
        made = pa.Table.from_pylist(parse(str(path)).rows())
        return _File(path, made.column_names, made.select)
    if not path.is_file():
        raise DataError(
            "is a folder" if path.is_dir() else "no such data file",
            field=str(path),
            expected="a parquet, Arrow, JSON or CSV file",
            remedy="check data.train_files and data.val_files; paths are relative to the working folder",
        )
    if path.stat().st_size == 0:
        raise _empty(path)
    try:
        if format_of(path) != PARQUET:
            table = _whole(path)
            return _File(path, table.column_names, table.select)
        parquet = pa_parquet.ParquetFile(path)
        return _File(path, parquet.schema_arrow.names, lambda columns: parquet.read(columns=columns))
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


def format_of(path: Path) -> str:
    """The format that a file's name tells."""
    name = Path(path.stem) if path.suffix == ".gz" else path
    return FORMATS.get(name.suffix, PARQUET)


def opened(path: Path) -> IO[bytes]:
    """The bytes of a file, which may be packed by gzip."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _whole(path: Path) -> pa.Table:
    """All of a file that is not parquet."""
    kind = format_of(path)
    if kind == CSV:
        return pa_csv.read_csv(path)
    if kind == ARROW:
        with pa.memory_map(str(path)) as file:
            is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
            file.seek(0)
            return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(file).read_all()
    with opened(path) as file:
        if kind == JSON and file.read(64).lstrip()[:1] == b"[":
            file.seek(0)
            rows = json.load(file)
            if not all(isinstance(row, dict) for row in rows):
                raise ValueError("a list of other things than objects")
            names = dict.fromkeys(name for row in rows for name in row)
            return pa.table({name: [row.get(name) for row in rows] for name in names})
    return pa_json.read_json(path, read_options=pa_json.ReadOptions(block_size=JSON_BLOCK_BYTES))


def _shared_columns(
    files: list[_File], alternatives: Sequence[Sequence[str]], keys: Sequence[str]
) -> list[str]:
    """The first alternative whose columns all files have."""
    for wanted in alternatives:
        if all(set(wanted) <= set(file.columns) for file in files):
            return list(wanted)
    expected = " or ".join(dict.fromkeys(", ".join(wanted) for wanted in alternatives))
    for file in files:
        missing = [[name for name in wanted if name not in file.columns] for wanted in alternatives]
        if all(missing):
            raise DataError(
                "missing column " + " or ".join(dict.fromkeys(" and ".join(map(repr, n)) for n in missing)),
                field=str(file.path),
                got=f"columns {', '.join(file.columns)}",
                expected=expected,
                remedy=_nearest([name for names in missing for name in names], file.columns)
                + "rename the columns"
                + (f", or name yours with {' or '.join(keys)}" if keys else ""),
            )
    raise DataError(
        "the files have different columns",
        field=", ".join(str(file.path) for file in files),
        got="; ".join(", ".join(file.columns) for file in files),
        expected=f"{expected}, the same in every file",
    )


def _nearest(missing: Sequence[str], columns: Sequence[str]) -> str:
    """Which columns may be meant by those that are missing, as the beginning of a remedy."""
    lower = {name.lower(): name for name in columns}
    close = {name: difflib.get_close_matches(name.lower(), lower, n=1) for name in missing}
    return "".join(f"is {lower[near[0]]!r} the {name!r}? " for name, near in close.items() if near)


def _read(file: _File, columns: list[str]) -> pa.Table:
    try:
        table = file.read([name for name in columns if name in file.columns])
        table.validate(full=True)  # texts that are no UTF-8 come to light here, and not row by row
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(file.path, error) from error
    if table.num_rows == 0:
        raise _empty(file.path)
    return table


def _empty(path: Path) -> DataError:
    return DataError("the data file is empty", field=str(path), got="0 rows", expected="at least one row")


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"not a readable {format_of(path)} file",
        field=str(path),
        got=str(error).splitlines()[0],
        expected="a parquet, Arrow, JSON or CSV file",
        remedy="write the file anew; it may be cut off or of another format",
    )
