"""Rows that a program holds, as data files: a list of dicts, a table of pandas, polars, pyarrow, datasets."""

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
"""Paths, one or a list, or a list of dicts, or a table."""


def data_files(rows: Rows, folder: Path, name: str) -> list[str]:
    """The data files of some rows: paths as they are; all else is written to `NAME-HASH.parquet`, where the
    same rows find the file that is there.

    Args:
        folder: where to write.
        name: what the rows are, `train` or `val`.

    Raises:
        DataError: they are of no known kind, or have no rows, or a column has values of several types.
    """
    if isinstance(rows, str | os.PathLike):
        return [os.fspath(rows)]
    if isinstance(rows, Sequence) and rows and all(isinstance(row, str | os.PathLike) for row in rows):
        return [os.fspath(row) for row in rows]
    table = _table(rows, name)
    if not table.num_rows:
        raise DataError("no rows", field=name, remedy="give at least one")
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
    if hasattr(rows, "with_format") and hasattr(rows, "column_names"):  # datasets, with its own row order
        if isinstance(rows, Mapping):
            raise _unknown(rows, name, "choose one of its splits: " + ", ".join(map(str, rows)))
        return rows.with_format("arrow")[:]
    if hasattr(rows, "__arrow_c_stream__"):  # pandas, polars and others
        return pa.table(rows)
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        raise _unknown(
            rows, name, "give a list of dicts, a table of pandas, polars, pyarrow or datasets, or paths"
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
            expected="one type for all rows",
            remedy="convert them, for example all to text",
        ) from error


def _unknown(rows: Rows, name: str, remedy: str) -> DataError:
    return DataError("these are no rows", field=name, got=type(rows).__name__, remedy=remedy)
