"""Checks that reading JSON rows into a table does not change values.

A table has one type per column. So if a column has values of different types, a reader converts some of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from tandem.texts import TooLongNumber

_SHOWN = 40
_KINDS = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number with a point",
    dict: "an object",
    list: "a list",
}
Row = tuple[Any, str | None]
"""A pair: a parsed row and None, or None and the reason why the row cannot be parsed."""
Seen = dict[str, tuple[str, int]]
"""A dict from path in a row to (type of its values, number of the first row with this type)."""


class RowError(ValueError):
    """Raised for a row that no table can store unchanged. The text names the row and the value."""


def kind_of(value: Any) -> str:
    """Return a description of a JSON value's type."""
    return _KINDS.get(type(value), "null")


def type_conflicts(value: Any, number: int, seen: Seen, at: str = "") -> Iterator[str]:
    """Yield type conflicts with earlier rows, and numbers that no table can store.

    Args:
        value: A JSON value.
        number: The number of the value's row.
        seen: The types in earlier rows. This function adds new paths.
        at: The path of the value in the row.
    """
    if value is None:
        return
    if isinstance(value, TooLongNumber):
        shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}…"
        yield f"{at.removeprefix('.')}: the number {shown} does not fit into 64 bits; write it as text"
        return
    kind = kind_of(value)
    usual, row = seen.setdefault(at, (kind, number))
    if kind != usual:
        yield f"{at.removeprefix('.')}: {kind}, but {usual} in row {row}"
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from type_conflicts(inner, number, seen, f"{at}.{name}")
    elif isinstance(value, list):
        for inner in value:
            yield from type_conflicts(inner, number, seen, f"{at}[]")


def checked_rows(rows: Iterable[Row]) -> Iterator[tuple[int, Any, str | None]]:
    """Yield (row number from 0, row, problem or None) for each row of JSON.

    A row has a problem if it cannot be read, is not an object, or has a value whose type differs from that in
    an earlier row.
    """
    seen: Seen = {}
    for number, (row, problem) in enumerate(rows):
        if problem is None and not isinstance(row, dict):
            problem = f"{kind_of(row)}, not an object"
        yield number, row, problem or next(type_conflicts(row, number, seen), None)


def table_of(rows: Iterable[Row]) -> pa.Table:
    """Return rows of JSON as a table.

    Raises:
        RowError: A row has a problem; see `checked_rows`.
    """
    held: list[dict[str, Any]] = []
    for number, row, problem in checked_rows(rows):
        if problem:
            raise RowError(f"row {number}: {problem}")
        held.append(row)
    names = dict.fromkeys(name for row in held for name in row)
    return pa.table({name: [row.get(name) for row in held] for name in names})


def leaves(kind: pa.DataType, at: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, type) for each path in a column whose values may be converted."""
    if pa.types.is_struct(kind):
        for field in kind:
            yield from leaves(field.type, f"{at}.{field.name}")
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield from leaves(kind.value_type, f"{at}[]")
    elif pa.types.is_integer(kind):
        yield at, "whole numbers"
    elif pa.types.is_floating(kind):
        yield at, "floating-point numbers"
    elif pa.types.is_decimal(kind):
        yield at, f"decimals of {kind.scale} places"
    elif pa.types.is_timestamp(kind):
        yield at, f"times of the zone {kind.tz}"
    elif pa.types.is_date(kind):
        yield at, "dates"


def refuse_conversions(schemas: Iterable[pa.Schema]) -> None:
    """Check that tables keep their values when they are concatenated.

    Raises:
        pa.ArrowTypeError: A column's values would be converted, for example dates to times.
    """
    seen: dict[str, str] = {}
    for schema in schemas:
        for field in schema:
            for at, kind in leaves(field.type, field.name):
                if (usual := seen.setdefault(at, kind)) != kind:
                    raise pa.ArrowTypeError(f"column {at}: {usual}, but later {kind}")
