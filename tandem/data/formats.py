"""Read one data file as a table: parquet, Arrow, JSON, CSV or a task.

With a cache folder, the table is mapped instead of loaded.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pa_parquet

from tandem.data.cache import BATCH_ROWS, digest, entry, file_digest, is_zero_copy, mapped, write_arrow
from tandem.data.depth import Shallow
from tandem.data.values import Row, RowError, leaves, table_of
from tandem.errors import DataError
from tandem.tasks import is_task, parse
from tandem.texts import parse_exact

ARROW, CSV, JSON, LINES, PARQUET = "Arrow", "CSV", "JSON", "JSON-lines", "parquet"
FORMATS = {".arrow": ARROW, ".feather": ARROW, ".csv": CSV, ".json": JSON, ".jsonl": LINES}
"""The format for each file extension, after `.gz` is removed. All other files are read as parquet.

A `.json` file contains either a list, or one row per line.
"""
UNREADABLE = (OSError, EOFError, ValueError, OverflowError, RecursionError, pa.ArrowException)
_READABLE = "a parquet, Arrow, JSON or CSV file"
BLOCK_BYTES = 64 << 20
"""The number of bytes read at a time, and the longest line of a JSON-lines file.

Arrow's default of 1 MiB is shorter than a long conversation.
"""
_READING = 2
"""The version of the file reader. Cached copies from another version are made again."""
_PACKED = 5
"""The assumed compression ratio of gzip."""


class FileRows(NamedTuple):
    """The rows of a file.

    Attributes:
        table: The rows.
        place: The Arrow file that the rows are mapped from; None if the rows are not mapped.
        digest: A digest of the rows; empty if the rows are not mapped.
    """

    table: pa.Table
    place: Path | None = None
    digest: str = ""


class File(NamedTuple):
    """An opened file: its schema, its number of rows, and a function that reads some of its columns."""

    path: Path
    schema: pa.Schema
    rows: int
    read: Callable[[list[str]], FileRows]

    @property
    def columns(self) -> list[str]:
        return list(self.schema.names)


def open_file(path: Path, cache: Path | None) -> File:
    """Open a file and read its schema.

    Args:
        path: The file, or a task.
        cache: The cache folder; None: read all rows into memory.

    Raises:
        DataError: The file is missing, unreadable or empty.
    """
    if is_task(str(path)):
        return _file_of_rows(
            path, FileRows(pa.Table.from_pylist(parse(str(path)).rows()), None, digest(str(path)))
        )
    if not path.is_file():
        raise DataError(
            "this is a folder" if path.is_dir() else "no such data file",
            field=str(path),
            expected=_READABLE,
            remedy="check data.train_files and data.val_files; paths are relative to the working folder",
        )
    try:
        file = _inspected(path, cache) if path.stat().st_size else None
    except DataError:
        raise
    except UNREADABLE as error:
        raise unreadable(path, error) from error
    if file is None or not file.rows:
        raise DataError(
            "the data file is empty",
            field=str(path),
            got="0 rows",
            expected="at least one row",
            remedy="write rows to this file, or name another file",
        )
    return file


def _inspected(path: Path, cache: Path | None) -> File:
    kind = format_of(path)
    if kind != PARQUET:
        if cache is None:
            return _file_of_rows(path, FileRows(whole_table(path)))
        if kind == ARROW and is_zero_copy(table := mapped(path)):
            return _file_of_rows(path, FileRows(table, path, file_digest(path)))
        return _file_of_rows(path, _cached_rows(path, cache, partial(_blocks, path)))
    parquet = pa_parquet.ParquetFile(path)

    def read(names: list[str]) -> FileRows:
        if cache is None:
            return FileRows(parquet.read(columns=names))
        batches = partial(parquet.iter_batches, BATCH_ROWS, columns=names)
        return _cached_rows(path, cache, lambda: map(pa.Table.from_batches, zip(batches())), names)

    return File(path, parquet.schema_arrow, parquet.metadata.num_rows, read)


def _file_of_rows(path: Path, part: FileRows) -> File:
    """Return a `File` object for rows that were already read."""
    table = part.table
    return File(path, table.schema, len(table), lambda names: part._replace(table=table.select(names)))


def _cached_rows(
    path: Path, cache: Path, tables: Callable[[], Iterator[pa.Table]], names: Sequence[str] = ()
) -> FileRows:
    """Return the rows of a file from the cache; if the cache lacks these rows, add them first.

    Args:
        path: The file.
        cache: The cache folder.
        tables: A function that yields the file's tables.
        names: The columns to read; empty: all columns.
    """
    rows_digest = digest(_READING, file_digest(path), names)
    place = entry(
        cache, f"rows-{rows_digest}.arrow", f"the rows of {path}", lambda to: write_arrow(to, tables)
    )
    return FileRows(mapped(place), place, rows_digest)


def as_one(parts: list[FileRows], cache: Path) -> list[FileRows]:
    """Return the tables of several files with equal column types.

    If the tables have different types or are not all mapped, they are combined in one cache entry.
    """
    if (
        all(part.place for part in parts)
        and len({part.table.schema.remove_metadata() for part in parts}) == 1
    ):
        return parts
    rows_digest = digest(*((part.digest, part.table.column_names) for part in parts))

    def tables() -> Iterator[pa.Table]:
        for part in parts:
            yield from (pa.Table.from_batches([batch]) for batch in part.table.to_batches(BATCH_ROWS))

    place = entry(
        cache, f"rows-{rows_digest}.arrow", "the rows of all files", lambda to: write_arrow(to, tables)
    )
    return [FileRows(mapped(place), place, rows_digest)]


def bytes_of(path: Path) -> int:
    """Estimate how many bytes a file's rows need in memory; 0 if the path is not a file."""
    if is_task(str(path)) or not path.is_file():
        return 0
    size = path.stat().st_size
    if format_of(path) != PARQUET:
        return size * (_PACKED if path.suffix == ".gz" else 1)
    with suppress(*UNREADABLE):  # reading the file reports the error later
        metadata = pa_parquet.read_metadata(path)
        size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    return size


def format_of(path: Path) -> str:
    """Return the format of a file, according to its extension."""
    name = Path(path.stem) if path.suffix == ".gz" else path
    return FORMATS.get(name.suffix, PARQUET)


def opened(path: Path) -> IO[bytes]:
    """Open a file for reading bytes; `.gz` files are decompressed."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def is_list(path: Path) -> bool:
    """Return whether a JSON file contains a list, instead of one row per line."""
    with opened(path) as file:
        return format_of(path) == JSON and file.read(64).lstrip()[:1] == b"["


def whole_table(path: Path) -> pa.Table:
    """Read a whole file that is not parquet."""
    kind = format_of(path)
    if kind == CSV:
        return _open_csv(path).read_all()
    if kind == ARROW:
        return mapped(path)
    with opened(path) as file:
        return table_of(listed(file)) if is_list(path) else _json_lines(file)


def _json_lines(source: IO[bytes]) -> pa.Table:
    """Read the rows of JSON lines; `source` must be at its beginning.

    Arrow converts texts that look like times to times, and large integers to floats. If the result has times
    or floats, Python's JSON parser parses the rows again.
    """
    options = pa_json.ReadOptions(block_size=BLOCK_BYTES)
    table = pa_json.read_json(Shallow(source), read_options=options)
    kinds = {kind for field in table.schema for _, kind in leaves(field.type)}
    if not any(kind.startswith(("floating", "times")) for kind in kinds):
        return table
    source.seek(0)
    return table_of(parsed_lines(source))


def listed(source: IO[bytes]) -> Iterator[Row]:
    """Yield the rows of a JSON list.

    Raises:
        ValueError: The text is not JSON, or it is nested too deeply.
    """
    for row in parse_exact(Shallow(source).read()):
        yield row, None


def parsed_lines(source: IO[bytes], parse: Callable[[bytes], Any] = parse_exact) -> Iterator[Row]:
    """Yield the rows of JSON lines; `parse` parses one line.

    For a line that cannot be parsed, yield the reason.
    """
    for text in source:
        try:
            if text.strip():
                yield parse(text), None
        except UnicodeDecodeError as error:
            yield None, f"not UTF-8: {error.reason} at byte {error.start} of the line"
        except ValueError as error:
            yield None, f"broken JSON: {error}"


def _blocks(path: Path) -> Iterator[pa.Table]:
    """Yield the rows of a file that is not parquet, one block at a time.

    A JSON list is one block.
    """
    kind = format_of(path)
    if kind in (ARROW, CSV):
        batches = mapped(path).to_batches() if kind == ARROW else _open_csv(path)
        yield from map(pa.Table.from_batches, zip(batches))
    elif is_list(path):
        yield whole_table(path)
    else:
        with opened(path) as file:
            while block := file.read(BLOCK_BYTES):
                if not block.isspace():
                    yield _json_lines(io.BytesIO(block + file.readline()))


def _open_csv(path: Path) -> pa_csv.CSVStreamingReader:
    """Yield the rows of a CSV file, one block at a time.

    All fields are texts, exactly as they are written in the file.
    """
    options = pa_csv.ReadOptions(block_size=BLOCK_BYTES)
    names = pa_csv.open_csv(path, read_options=options).schema.names
    texts = pa_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    return pa_csv.open_csv(path, read_options=options, convert_options=texts)


def read_columns(file: File, columns: list[str]) -> FileRows:
    try:
        part = file.read([name for name in columns if name in file.columns])
        if part.place is None:
            part.table.validate(full=True)  # finds texts that are not UTF-8 now, and not later row by row
    except (OSError, pa.ArrowException) as error:
        raise unreadable(file.path, error) from error
    return part


def unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"not a readable {format_of(path)} file",
        field=str(path),
        got=str(error).splitlines()[0],
        expected=_READABLE,
        remedy="fix the row; if a column needs values of different types, write all of them as text"
        if isinstance(error, RowError)
        else "write the file again; it may be incomplete, or its format may not match the end of its name "
        "(.parquet, .arrow, .json, .jsonl or .csv; other names are read as parquet)",
    )
