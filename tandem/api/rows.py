"""Write rows from Python to data files.

Rows can be a list of dicts, or a table of pandas, polars, pyarrow or datasets.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tandem.errors import DataError
from tandem.observability.files import replace_file

Rows = Any
"""One path, a list of paths, a list of dicts, or a table."""


def data_files(rows: Rows, folder: Path, name: str) -> list[str]:
    """Return the paths of data files with the given rows.

    Paths are returned unchanged. Other rows are written to `NAME-HASH.parquet`. Equal rows give the same file
    name, so an existing file is reused.

    Args:
        rows: the rows, or paths of files.
        folder: the folder to write to.
        name: "train" or "val"; first part of the file name.

    Raises:
        DataError: the rows have an unknown type, the list of rows is empty, or a column has values of several
            types.
    """
    if isinstance(rows, str | os.PathLike):
        return [os.fspath(rows)]
    if isinstance(rows, Sequence) and rows and all(isinstance(row, str | os.PathLike) for row in rows):
        return [os.fspath(row) for row in rows]
    table = _table(rows, name)
    if not table.num_rows:
        raise DataError("there are no rows", field=name, remedy="pass at least one row")
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(None), sink)
    content = sink.getvalue()
    path = folder / f"{name}-{hashlib.blake2b(content, digest_size=4).hexdigest()}.parquet"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    return [str(path)]


def _table(rows: Rows, name: str) -> pa.Table:
    if isinstance(rows, pa.Table):
        return rows
    # A table of datasets may hold its rows in another order than its memory, so read it through its own API.
    if hasattr(rows, "with_format") and hasattr(rows, "column_names"):
        if isinstance(rows, Mapping):
            raise _unknown(rows, name, "pass one of its splits: " + ", ".join(map(str, rows)))
        return rows.with_format("arrow")[:]
    if hasattr(rows, "__arrow_c_stream__"):  # pandas, polars and other libraries
        return pa.table(rows)
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        raise _unknown(
            rows, name, "pass a list of dicts, a table of pandas, polars, pyarrow or datasets, or paths"
        )
    names = dict.fromkeys(column for row in rows for column in row)
    return pa.table({column: _column(column, [row.get(column) for row in rows], name) for column in names})


def _column(column: Any, values: list[Any], name: str) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        kinds = sorted({type(value).__name__ for value in values if value is not None})
        raise DataError(
            "a column has values of several types",
            field=f"{name}, column {column!r}",
            got=f"{', '.join(kinds)} ({str(error).splitlines()[0]})",
            expected="the same type in all rows",
            remedy="convert the values, for example all to text",
        ) from error


def _unknown(rows: Rows, name: str, remedy: str) -> DataError:
    return DataError(
        "rows of this type are not supported", field=name, got=type(rows).__name__, remedy=remedy
    )
