"""The cache folder for rows and tokens of data files.

Rows are stored as Arrow files, which are mapped into memory. The name of an entry is a digest of all its
inputs, so an entry can never be outdated. Entries that no run has used for a month are removed. Several runs
may use the folder at the same time: an entry is written under a temporary name first, then renamed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from tandem.data.values import refuse_conversions
from tandem.errors import DataError
from tandem.lifetime import UNUSED_SECONDS
from tandem.observability.terminal import warn

ABANDONED_SECONDS = 86400
"""The age, in seconds, after which an unfinished entry is considered a leftover of a killed run."""
BATCH_ROWS = 8192
_BUILDING = ".building-"
_ENDS = 1 << 16
_PERMISSIVE = "permissive"


def entry(folder: Path, name: str, what: str, build: Callable[[Path], None]) -> Path:
    """Return the path of a cache entry; if the entry is missing, build it first.

    A message tells the user whether the entry was found or built.

    Args:
        folder: The cache folder. It is created when it is first needed.
        name: The unique name of the entry.
        what: A description of the content, for messages.
        build: A function that writes the entry, a file or a folder, to the given path.

    Raises:
        DataError: The folder cannot be written. Errors that `build` raises pass through.
    """
    place = folder / name
    if place.exists():
        os.utime(place)
        warn(f"{what} taken from the cache: {place}")
        return place
    began = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=_BUILDING) as building:
            build(Path(building, name))
            try:
                os.rename(Path(building, name), place)
            except OSError:
                if not place.is_dir():  # if it is a folder, another run built the entry first
                    raise
    except OSError as error:
        if error.errno is None:  # an error of Arrow about the file that is being read
            raise
        raise DataError(
            f"the cache folder cannot be written: {error}",
            field="data.cache_dir",
            got=folder,
            expected="a folder with enough free space for the rows and their tokens",
        ) from error
    warn(f"{what} written to the cache: {place} (took {time.monotonic() - began:.0f} s)")
    _sweep(folder)
    return place


def _sweep(folder: Path) -> None:
    """Remove entries that were not used for a long time.

    A run that has such an entry open can still read it.
    """
    for each in folder.iterdir():
        with suppress(FileNotFoundError):  # another run may remove the same entry
            limit = ABANDONED_SECONDS if each.name.startswith(_BUILDING) else UNUSED_SECONDS
            if time.time() - each.stat().st_mtime > limit:
                shutil.rmtree(each) if each.is_dir() else each.unlink()


def digest(*parts: object) -> str:
    """Return a short digest of plain values."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def number_of(text: str) -> int:
    """Return a 64-bit number that identifies a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def file_digest(path: Path) -> str:
    """Return a digest of a file: of its size, modification time, first bytes and last bytes.

    The digest differs between files, and between versions of the same file.
    """
    state = path.stat()
    with path.open("rb") as file:
        first = file.read(_ENDS)
        file.seek(max(0, state.st_size - _ENDS))
        return digest(state.st_size, state.st_mtime_ns, first, file.read(_ENDS))


def write_arrow(place: Path, tables: Callable[[], Iterator[pa.Table]]) -> None:
    """Write the concatenated rows of tables into one Arrow file, which can be mapped into memory.

    One table is in memory at a time.

    Args:
        place: The path of the Arrow file.
        tables: A function that yields the tables. Column types may become wider from one table to the next.
            In that case the function is called a second time.

    Raises:
        pyarrow.ArrowException: The column types of the tables cannot be combined.
    """
    schema = _write_tables(place, tables(), None)
    if schema is not None:
        _write_tables(place, tables(), schema)


def _write_tables(place: Path, tables: Iterator[pa.Table], schema: pa.Schema | None) -> pa.Schema | None:
    """Write the tables; return None, or the schema that all tables need.

    If `schema` is None, the first table's schema is used. If the schema does not fit a table, the file is
    incomplete, and the result is the schema that fits all tables.
    """
    first = _plain(next(tables, pa.table({})))
    schema = widest = schema or first.schema
    with pa.OSFile(str(place), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        while first is not None:
            refuse_conversions([widest, first.schema])
            cast = pa.concat_tables([schema.empty_table(), first], promote_options=_PERMISSIVE)
            if cast.schema.equals(schema) and widest is schema:
                cast.validate(full=True)  # finds texts that are not UTF-8
                writer.write_table(cast.combine_chunks(), max_chunksize=BATCH_ROWS)
            elif not cast.schema.equals(schema):
                widest = pa.unify_schemas([widest, first.schema], promote_options=_PERMISSIVE)
            first = next((_plain(table) for table in tables), None)
    return None if widest is schema else widest


def _plain(table: pa.Table) -> pa.Table:
    """Return the table without metadata and without dictionary columns.

    An Arrow file has one dictionary for all batches, so dictionary columns are stored as plain values.
    """
    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields)).replace_schema_metadata(None)


def mapped(path: Path) -> pa.Table:
    """Return the table of an Arrow file, mapped into memory.

    Pages of the file are in memory only while they are used.
    """
    with pa.memory_map(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(file).read_all()


def is_zero_copy(table: pa.Table) -> bool:
    """Return whether a mapped table uses the file's memory without copies (the file is not compressed)."""
    buffers = (b for column in table.columns for chunk in column.chunks for b in chunk.buffers() if b)
    return not any(buffer.is_mutable for buffer in buffers)
