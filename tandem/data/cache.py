"""A folder of what was made of data files: rows as Arrow files that are mapped into memory, and their tokens.
An entry is named by what it is made of, so that it never goes stale; one that no run used for a month goes.
Several runs may use the folder at once: an entry is written beside, then renamed."""

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
from tandem.observability.terminal import warn

UNUSED_SECONDS = 30 * 86400
ABANDONED_SECONDS = 86400
"""After this long without a change an entry in the making was left behind by a run that was killed."""
BATCH_ROWS = 8192
_BUILDING = ".building-"
_ENDS = 1 << 16
_PERMISSIVE = "permissive"


def entry(folder: Path, name: str, what: str, build: Callable[[Path], None]) -> Path:
    """Return the path of an entry, built where it is not there yet; the user is told either way.

    Args:
        folder: of the entries; made when it is first needed.
        name: tells it from all others.
        what: is in it, in words.
        build: writes it, a file or a folder, to the path that it is given.

    Raises:
        DataError: the folder cannot be written; or what `build` raises.
    """
    place = folder / name
    if place.exists():
        os.utime(place)
        warn(f"{what} taken from {place}")
        return place
    began = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=_BUILDING) as building:
            build(Path(building, name))
            try:
                os.rename(Path(building, name), place)
            except OSError:
                if not place.is_dir():  # else another run was faster
                    raise
    except OSError as error:
        if error.errno is None:  # Arrow's, of the file that is read
            raise
        raise DataError(
            f"the data cannot be kept there: {error}",
            field="data.cache_dir",
            got=folder,
            expected="a folder with room for the rows and their tokens",
        ) from error
    warn(f"{what} kept in {place}, made in {time.monotonic() - began:.0f} s")
    _sweep(folder)
    return place


def _sweep(folder: Path) -> None:
    """Remove what was not used for long; runs that have it open keep it."""
    for each in folder.iterdir():
        with suppress(FileNotFoundError):  # another run removes the same
            limit = ABANDONED_SECONDS if each.name.startswith(_BUILDING) else UNUSED_SECONDS
            if time.time() - each.stat().st_mtime > limit:
                shutil.rmtree(each) if each.is_dir() else each.unlink()


def digest(*parts: object) -> str:
    """A short name for plain values."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def number_of(text: str) -> int:
    """A number of 64 bits that tells a text from others."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def file_digest(path: Path) -> str:
    """Tells a file from others, and from what it was, by its size, time of change, beginning and end."""
    state = path.stat()
    with path.open("rb") as file:
        first = file.read(_ENDS)
        file.seek(max(0, state.st_size - _ENDS))
        return digest(state.st_size, state.st_mtime_ns, first, file.read(_ENDS))


def write_arrow(place: Path, tables: Callable[[], Iterator[pa.Table]]) -> None:
    """Writes tables below each other into one Arrow file that can be mapped, a table at a time.

    Args:
        tables: gives them, each time it is called; their types may widen from one to the next, and then
            they are asked for twice.

    Raises:
        pyarrow.ArrowException: their types do not go together.
    """
    schema = _written(place, tables(), None)
    if schema is not None:
        _written(place, tables(), schema)


def _written(place: Path, tables: Iterator[pa.Table], schema: pa.Schema | None) -> pa.Schema | None:
    """Writes the tables; if one is of other types than the schema, or than the first, returns the schema of
    all of them instead."""
    first = _plain(next(tables, pa.table({})))
    schema = widest = schema or first.schema
    with pa.OSFile(str(place), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        while first is not None:
            refuse_conversions([widest, first.schema])
            cast = pa.concat_tables([schema.empty_table(), first], promote_options=_PERMISSIVE)
            if cast.schema.equals(schema) and widest is schema:
                cast.validate(full=True)  # texts that are no UTF-8 come to light here
                writer.write_table(cast.combine_chunks(), max_chunksize=BATCH_ROWS)
            elif not cast.schema.equals(schema):
                widest = pa.unify_schemas([widest, first.schema], promote_options=_PERMISSIVE)
            first = next((_plain(table) for table in tables), None)
    return None if widest is schema else widest


def _plain(table: pa.Table) -> pa.Table:
    """Without metadata, and without dictionaries, of which an Arrow file holds one for all batches."""
    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields)).replace_schema_metadata(None)


def mapped(path: Path) -> pa.Table:
    """The table of an Arrow file, read where it lies: its pages are in memory only while they are used."""
    with pa.memory_map(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(file).read_all()


def lies_in_file(table: pa.Table) -> bool:
    """Whether a mapped table is not compressed, so that nothing of it was copied."""
    buffers = (b for column in table.columns for chunk in column.chunks for b in chunk.buffers() if b)
    return not any(buffer.is_mutable for buffer in buffers)
