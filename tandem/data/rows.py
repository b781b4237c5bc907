"""Write a table with additional columns to a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pa_parquet

from tandem.errors import DataError


def check_new_columns(table: pa.Table, names: Sequence[str]) -> None:
    """Check that the table does not have the columns that will be added.

    Raises:
        DataError: The table already has one of these columns.
    """
    clash = [name for name in names if name in table.column_names]
    if clash:
        raise DataError(
            "the data already have a column with a name that the output needs",
            field=clash[0],
            got=f"columns {', '.join(table.column_names)}",
            remedy="rename it in the data file",
        )


def write_rows(path: Path, table: pa.Table, columns: Mapping[str, pa.Array]) -> None:
    """Write the table's columns and additional columns to a file.

    The file is written atomically: after a crash, the path is unchanged.

    Args:
        path: A path that ends with `.parquet` or `.jsonl`. An existing file is replaced.
        table: The rows.
        columns: Additional columns with one entry per row.
    """
    for name, column in columns.items():
        table = table.append_column(name, column)
    partial = path.with_name(path.name + ".partial")
    if path.suffix == ".parquet":
        pa_parquet.write_table(table, partial)
    else:
        with partial.open("w", encoding="utf-8") as file:
            for batch in table.to_batches(max_chunksize=1024):
                file.writelines(json_line(row) + "\n" for row in batch.to_pylist())
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)


def json_line(row: Mapping[str, Any]) -> str:
    """Return the row as one line of JSON; dates, times and decimals become text.

    Raises:
        TypeError: A value has a type that JSON does not support, such as bytes.
    """
    return json.dumps(row, ensure_ascii=False, default=_as_text)


def _as_text(value: Any) -> str:
    if isinstance(value, datetime | date | time | Decimal):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
