"""One data file as a table: parquet, Arrow, JSON, CSV, or a task; mapped from a cache where there is one."""

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

from tandem.data.cache import BATCH_ROWS, digest, entry, file_digest, lies_in_file, mapped, write_arrow
from tandem.data.depth import Shallow
from tandem.data.values import Row, RowError, leaves, table_of
from tandem.errors import DataError
from tandem.tasks import is_task, parse
from tandem.texts import parse_exact

ARROW, CSV, JSON, LINES, PARQUET = "Arrow", "CSV", "JSON", "JSON-lines", "parquet"
FORMATS = {".arrow": ARROW, ".feather": ARROW, ".csv": CSV, ".json": JSON, ".jsonl": LINES}
"""By the file's ending, before `.gz`; others are parquet. A JSON file is a list, or has a row per line."""
UNREADABLE = (OSError, EOFError, ValueError, OverflowError, RecursionError, pa.ArrowException)
_READABLE = "a parquet, Arrow, JSON or CSV file"
BLOCK_BYTES = 64 << 20
"""Read at a time, and the longest line of a JSON-lines file: Arrow's default, 1 MiB, is less than a long
conversation."""
_READING = 2
"""Of the way in which files are read: copies that were made in another are made anew."""
_PACKED = 5
"""About how many bytes gzip makes of one."""


class FileRows(NamedTuple):
    """The rows of a file, the Arrow file they are mapped from, if any, and what tells them from others."""

    table: pa.Table
    place: Path | None = None
    digest: str = ""


class File(NamedTuple):
    """A file that was opened: what is in it, how many rows, and how columns of it are read."""

    path: Path
    schema: pa.Schema
    rows: int
    read: Callable[[list[str]], FileRows]

    @property
    def columns(self) -> list[str]:
        return list(self.schema.names)


def open_file(path: Path, cache: Path | None) -> File:
    """Look into a file.

    Args:
        cache: the folder of what is made of files; None: all is read into memory.

    Raises:
        DataError: it is missing, unreadable or empty.
    """
    if is_task(str(path)):
        return _held(path, FileRows(pa.Table.from_pylist(parse(str(path)).rows()), None, digest(str(path))))
    if not path.is_file():
        raise DataError(
            "is a folder" if path.is_dir() else "no such data file",
            field=str(path),
            expected=_READABLE,
            remedy="check data.train_files and data.val_files; paths are relative to the working folder",
        )
    try:
        file = _looked_into(path, cache) if path.stat().st_size else None
    except DataError:
        raise
    except UNREADABLE as error:
        raise unreadable(path, error) from error
    if file is None or not file.rows:
        raise DataError("the data file is empty", field=str(path), got="0 rows", expected="at least one row")
    return file


def _looked_into(path: Path, cache: Path | None) -> File:
    kind = format_of(path)
    if kind != PARQUET:
        if cache is None:
            return _held(path, FileRows(whole_table(path)))
        if kind == ARROW and lies_in_file(table := mapped(path)):
            return _held(path, FileRows(table, path, file_digest(path)))
        return _held(path, _kept(path, cache, partial(_blocks, path)))
    parquet = pa_parquet.ParquetFile(path)

    def read(names: list[str]) -> FileRows:
        if cache is None:
            return FileRows(parquet.read(columns=names))
        batches = partial(parquet.iter_batches, BATCH_ROWS, columns=names)
        return _kept(path, cache, lambda: map(pa.Table.from_batches, zip(batches())), names)

    return File(path, parquet.schema_arrow, parquet.metadata.num_rows, read)


def _held(path: Path, part: FileRows) -> File:
    """A file whose rows are there already."""
    table = part.table
    return File(path, table.schema, len(table), lambda names: part._replace(table=table.select(names)))


def _kept(
    path: Path, cache: Path, tables: Callable[[], Iterator[pa.Table]], names: Sequence[str] = ()
) -> FileRows:
    """The rows of a file, from an entry of the cache.

    Args:
        tables: gives them, each time it is called.
        names: of their columns, where they are not all.
    """
    told = digest(_READING, file_digest(path), names)
    place = entry(cache, f"rows-{told}.arrow", f"the rows of {path}", lambda to: write_arrow(to, tables))
    return FileRows(mapped(place), place, told)


def as_one(parts: list[FileRows], cache: Path) -> list[FileRows]:
    """Tables of the same types, all mapped: where these are not, one from an entry of the cache."""
    if (
        all(part.place for part in parts)
        and len({part.table.schema.remove_metadata() for part in parts}) == 1
    ):
        return parts
    told = digest(*((part.digest, part.table.column_names) for part in parts))

    def tables() -> Iterator[pa.Table]:
        for part in parts:
            yield from (pa.Table.from_batches([batch]) for batch in part.table.to_batches(BATCH_ROWS))

    place = entry(cache, f"rows-{told}.arrow", "the rows of all files", lambda to: write_arrow(to, tables))
    return [FileRows(mapped(place), place, told)]


def bytes_of(path: Path) -> int:
    """About how many bytes a file's rows have in memory; 0 of what is no file."""
    if is_task(str(path)) or not path.is_file():
        return 0
    size = path.stat().st_size
    if format_of(path) != PARQUET:
        return size * (_PACKED if path.suffix == ".gz" else 1)
    with suppress(*UNREADABLE):  # which its reading says
        metadata = pa_parquet.read_metadata(path)
        size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    return size


def format_of(path: Path) -> str:
    """The format that a file's name tells."""
    name = Path(path.stem) if path.suffix == ".gz" else path
    return FORMATS.get(name.suffix, PARQUET)


def opened(path: Path) -> IO[bytes]:
    """The bytes of a file, which may be packed by gzip."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def is_list(path: Path) -> bool:
    """Whether a JSON file holds a list, and not a row per line."""
    with opened(path) as file:
        return format_of(path) == JSON and file.read(64).lstrip()[:1] == b"["


def whole_table(path: Path) -> pa.Table:
    """All of a file that is not parquet."""
    kind = format_of(path)
    if kind == CSV:
        return _open_csv(path).read_all()
    if kind == ARROW:
        return mapped(path)
    with opened(path) as file:
        return table_of(listed(file)) if is_list(path) else _json_lines(file)


def _json_lines(source: IO[bytes]) -> pa.Table:
    """The rows of JSON lines, from the beginning of `source`. Arrow makes times of texts that look like them,
    and numbers with a point of whole ones that it cannot hold: where it has either, Python reads."""
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
        ValueError: it is not JSON, or nested too deep.
    """
    for row in parse_exact(Shallow(source).read()):
        yield row, None


def parsed_lines(source: IO[bytes], parse: Callable[[bytes], Any] = parse_exact) -> Iterator[Row]:
    """Yield the rows of JSON lines, or what keeps each from being read; `parse` reads a line."""
    for text in source:
        try:
            if text.strip():
                yield parse(text), None
        except UnicodeDecodeError as error:
            yield None, f"not UTF-8: {error.reason} at byte {error.start} of the line"
        except ValueError as error:
            yield None, f"broken JSON: {error}"


def _blocks(path: Path) -> Iterator[pa.Table]:
    """The rows of a file that is not parquet, some at a time, but for a JSON list."""
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
    """The rows of a CSV file, a block at a time; all fields are texts, as they stand there."""
    options = pa_csv.ReadOptions(block_size=BLOCK_BYTES)
    names = pa_csv.open_csv(path, read_options=options).schema.names
    texts = pa_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    return pa_csv.open_csv(path, read_options=options, convert_options=texts)


def read_columns(file: File, columns: list[str]) -> FileRows:
    try:
        part = file.read([name for name in columns if name in file.columns])
        if part.place is None:
            part.table.validate(full=True)  # texts that are no UTF-8 come to light here, and not row by row
    except (OSError, pa.ArrowException) as error:
        raise unreadable(file.path, error) from error
    return part


def unreadable(path: Path, error: Exception) -> DataError:
    return DataError(
        f"not a readable {format_of(path)} file",
        field=str(path),
        got=str(error).splitlines()[0],
        expected=_READABLE,
        remedy="correct the row; a column whose values differ in kind can be written as text"
        if isinstance(error, RowError)
        else "write the file anew; it may be cut off or of another format",
    )
