"""What a reader must not do to values: turn one type into another where a table has one type per column."""

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
"""A row of JSON, or what kept it from being read."""
Seen = dict[str, tuple[str, int]]
"""By place in a row: the kind of the values there, and the row of the first."""


class RowError(ValueError):
    """A row holds what no table keeps as it stands; the text names the row and the value."""


def kind_of(value: Any) -> str:
    """Return the kind of a value of JSON, in words."""
    return _KINDS.get(type(value), "null")


def other_kinds(value: Any, number: int, seen: Seen, at: str = "") -> Iterator[str]:
    """Yield what is of another kind than in an earlier row, and numbers that no table holds.

    Args:
        value: of JSON, at the place `at` in row `number`.
        seen: of earlier rows; what is new is added.
    """
    if value is None:
        return
    if isinstance(value, TooLongNumber):
        shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}…"
        yield f"{at.removeprefix('.')}: 64 bits do not hold the number {shown}: write it as text"
        return
    kind = kind_of(value)
    usual, row = seen.setdefault(at, (kind, number))
    if kind != usual:
        yield f"{at.removeprefix('.')}: {kind}, but {usual} in row {row}"
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from other_kinds(inner, number, seen, f"{at}.{name}")
    elif isinstance(value, list):
        for inner in value:
            yield from other_kinds(inner, number, seen, f"{at}[]")


def looked_at(rows: Iterable[Row]) -> Iterator[tuple[int, Any, str | None]]:
    """Yield rows of JSON with their numbers, from 0, and what is wrong with each: it cannot be read, is no
    object, or holds another kind of value than an earlier one."""
    seen: Seen = {}
    for number, (row, problem) in enumerate(rows):
        if problem is None and not isinstance(row, dict):
            problem = f"{kind_of(row)}, not an object"
        yield number, row, problem or next(other_kinds(row, number, seen), None)


def table_of(rows: Iterable[Row]) -> pa.Table:
    """Return rows of JSON as a table.

    Raises:
        RowError: something is wrong with one; see `looked_at`.
    """
    held: list[dict[str, Any]] = []
    for number, row, problem in looked_at(rows):
        if problem:
            raise RowError(f"row {number}: {problem}")
        held.append(row)
    names = dict.fromkeys(name for row in held for name in row)
    return pa.table({name: [row.get(name) for row in held] for name in names})


def leaves(kind: pa.DataType, at: str = "") -> Iterator[tuple[str, str]]:
    """Yield each place in a column of this type where one kind of value may become another, with its kind."""
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
    """Check that tables below each other keep their values.

    Raises:
        pa.ArrowTypeError: a column would turn whole numbers into others, or dates into times.
    """
    seen: dict[str, str] = {}
    for schema in schemas:
        for field in schema:
            for at, kind in leaves(field.type, field.name):
                if (usual := seen.setdefault(at, kind)) != kind:
                    raise pa.ArrowTypeError(f"column {at}: {usual}, and further on {kind}")
