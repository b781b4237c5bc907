"""Read data files into one table; every error names the file."""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet

from tandem.data.cache import digest, mapped
from tandem.data.formats import (
    LINES,
    PARQUET,
    UNREADABLE,
    File,
    as_one,
    bytes_of,
    format_of,
    open_file,
    opened,
    read_columns,
    unreadable,
    whole_table,
)
from tandem.data.values import refuse_conversions
from tandem.errors import DataError
from tandem.tasks import is_task, parse

CHUNK_ROWS = 1024
IN_MEMORY_BYTES = 32 << 20
"""The size in bytes. If all files together are larger and there is a cache, the files are mapped."""


@dataclass(frozen=True)
class DataFiles:
    """The rows of all files, one file after the other.

    Attributes:
        table: The requested columns that exist.
        paths: The path of each file.
        starts: For each file, the row number of its first row in the table.
        arrow: The Arrow files that the table is mapped from; empty if the table is not mapped.
        digest: A digest of a mapped table.
    """

    table: pa.Table
    paths: tuple[Path, ...]
    starts: tuple[int, ...]
    arrow: tuple[Path, ...] = ()
    digest: str = ""

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def columns(self) -> list[str]:
        return list(self.table.column_names)

    def where(self, row: int) -> str:
        """Return a row's name for messages: its number in its file, and the file's name if needed."""
        place = bisect_right(self.starts, row) - 1
        file = f"{self.paths[place].name} " if len(self.paths) > 1 else ""
        return f"{file}row {row - self.starts[place]}"

    @property
    def names(self) -> str:
        """The paths of the files, for messages."""
        return ", ".join(map(str, self.paths))

    def records(self, columns: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (row number, row as Python objects) for every row, converted one chunk at a time."""
        table = self.table if columns is None else self.table.select(list(columns))
        for start in range(0, len(self), CHUNK_ROWS):
            yield from enumerate(table.slice(start, CHUNK_ROWS).to_pylist(), start)

    def take(self, rows: Sequence[int] | np.ndarray) -> list[dict[str, Any]]:
        """Return the rows with the given numbers, in the given order."""
        numbers = np.asarray(rows, dtype=np.int64)
        batches, ends = self._batches
        at = np.searchsorted(ends, numbers, side="right")
        found: dict[int, dict[str, Any]] = {}
        for place in np.unique(at).tolist():  # `take` on a table of many chunks would copy the whole table
            batch, (wanted,) = batches[place], np.nonzero(at == place)
            taken = batch.take(pa.array(numbers[wanted] - (ends[place] - len(batch)))).to_pylist()
            found.update(zip(wanted.tolist(), taken, strict=True))
        return [found[place] for place in range(len(numbers))]

    @cached_property
    def _batches(self) -> tuple[list[pa.RecordBatch], np.ndarray]:
        batches = self.table.to_batches()
        return batches, np.cumsum([len(batch) for batch in batches])


def read_files(
    files: str | Sequence[str],
    *alternatives: Sequence[str],
    optional: Sequence[str] | None = (),
    max_samples: int = -1,
    keys: Sequence[str] = (),
    cache_dir: str | None = None,
) -> DataFiles:
    """Read the columns of the first alternative that all files have.

    Args:
        files: One or several paths, or tasks (see `tandem.tasks`), in the formats of
            `tandem.data.formats.FORMATS`.
        alternatives: Sets of columns. The files must have all columns of at least one set.
        optional: Additional columns to read if they exist; None: all other columns.
        max_samples: Keep only the first `max_samples` rows of all files together; -1: all rows.
        keys: The config keys that name the columns, for messages.
        cache_dir: The cache folder. If the files are larger than `IN_MEMORY_BYTES`, they are mapped. Files of
            other formats than Arrow are first converted to Arrow in this folder. None: all rows are read into
            memory.

    Raises:
        DataError: `files` is empty, `max_samples` is out of range, a file is missing, unreadable, empty or
            lacks columns, or a column has different types in two files.
    """
    paths = [Path(file).expanduser() for file in ([files] if isinstance(files, str) else files)]
    if not paths:
        raise DataError("no data file is named", field="files", expected="at least one path")
    if max_samples < -1 or max_samples == 0:
        raise DataError("out of range", field="max_samples", got=max_samples, expected="-1 (all) or >= 1")
    cache = None
    if cache_dir is not None and sum(map(bytes_of, paths)) > IN_MEMORY_BYTES:
        cache = Path(cache_dir).expanduser()
    there = [open_file(path, cache) for path in paths]
    wanted = _shared_columns(there, alternatives, keys)
    names = None if optional is None else list(dict.fromkeys([*wanted, *optional]))
    parts = [read_columns(file, file.columns if names is None else names) for file in there]
    starts = [0, *accumulate(part.table.num_rows for part in parts[:-1])]
    try:
        refuse_conversions(part.table.schema for part in parts)
        if cache is not None:
            parts = as_one(parts, cache)
        whole = pa.concat_tables([part.table for part in parts], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(
            "the files have different types in one column",
            field=", ".join(map(str, paths)),
            got=error,
            expected="columns of the same names to have the same types",
            remedy="write the files again with equal types, or train on one of them",
        ) from error
    if max_samples > 0:
        whole = whole.slice(0, max_samples)
    if cache is None:
        return DataFiles(whole.combine_chunks(), tuple(paths), tuple(starts))
    whole_digest = digest(whole.column_names, len(whole), *(part.digest for part in parts))
    arrow = tuple(part.place for part in parts if part.place)
    return DataFiles(whole, tuple(paths), tuple(starts), arrow, whole_digest)


def read_part(arrow: Sequence[Path], columns: Sequence[str], start: int, stop: int) -> pa.Table:
    """Return the rows from `start` to `stop` of a table that is mapped from Arrow files."""
    tables = [mapped(path).select(list(columns)) for path in arrow]
    return pa.concat_tables(tables).slice(start, stop - start)


def count_rows(files: Sequence[str], max_samples: int = -1) -> int:
    """Count the rows of data files without reading more than needed.

    The count comes from the footer of a Parquet file, and from the number of lines of a JSON-lines file.

    Args:
        files: The paths of the files.
        max_samples: The largest number to return; -1: no limit.

    Raises:
        DataError: A file cannot be read.
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
                rows += whole_table(path).num_rows
        except UNREADABLE as error:
            raise unreadable(path, error) from error
    return min(rows, max_samples) if max_samples > 0 else rows


def _shared_columns(
    files: list[File], alternatives: Sequence[Sequence[str]], keys: Sequence[str]
) -> list[str]:
    """Return the columns of the first alternative that all files have."""
    for wanted in alternatives:
        if all(set(wanted) <= set(file.columns) for file in files):
            return list(wanted)
    expected = " or ".join(dict.fromkeys(", ".join(wanted) for wanted in alternatives))
    remedy = "rename the columns" + (f", or name yours with {' or '.join(keys)}" if keys else "")
    for file in files:
        missing = [[name for name in wanted if name not in file.columns] for wanted in alternatives]
        if all(missing):
            _refuse_numbers(file, [wanted[0] for wanted in alternatives], remedy)
            raise DataError(
                "missing column " + " or ".join(dict.fromkeys(" and ".join(map(repr, n)) for n in missing)),
                field=str(file.path),
                got=f"columns {', '.join(file.columns)}",
                expected=expected,
                remedy=_nearest([name for names in missing for name in names], file.columns) + remedy,
            )
    raise DataError(
        "the files have different columns",
        field=", ".join(str(file.path) for file in files),
        got="; ".join(", ".join(file.columns) for file in files),
        expected=f"{expected}, the same in every file",
    )


def _refuse_numbers(file: File, texts: Sequence[str], remedy: str) -> None:
    """Check that columns of texts or messages do not contain numbers.

    A column of numbers cannot be the intended column.

    Raises:
        DataError: A column contains numbers.
    """
    for name in texts:
        kind = file.schema.field(name).type if name in file.columns else None
        if kind is not None and (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise DataError(
                f"the column {name!r} holds numbers",
                field=str(file.path),
                got=f"{name}: {kind}; columns {', '.join(file.columns)}",
                expected="text, or a list of {role, content}",
                remedy=remedy,
            )


def _nearest(missing: Sequence[str], columns: Sequence[str]) -> str:
    """Return "did you mean" questions about similar column names, to start a remedy."""
    lower = {name.lower(): name for name in columns}
    close = {name: difflib.get_close_matches(name.lower(), lower, n=1) for name in missing}
    return "".join(f"is {lower[near[0]]!r} the column {name!r}? " for name, near in close.items() if near)
