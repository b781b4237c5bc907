"""Where the rows of text files stand, and what is wrong with the lines of one that cannot be read."""

from __future__ import annotations

import csv
import io
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from tandem.data.depth import Shallow
from tandem.data.formats import CSV, JSON, LINES, format_of, is_list, opened
from tandem.data.values import Seen, kind_of, other_kinds
from tandem.tasks import is_task
from tandem.texts import parse_exact

Scanned = Iterator[tuple[int, dict[str, Any] | None, str | None]]
"""Row numbers from 0, each with its row or with what is wrong with it."""


def line_numbers(path: Path) -> Sequence[int]:
    """The line, from 1, on which each row begins; none of a file whose rows have no lines."""
    kind = format_of(path)
    if is_task(str(path)) or kind not in (CSV, LINES, JSON) or is_list(path):
        return ()
    with opened(path) as file:
        if kind == CSV:
            return array("q", (line for line, _ in _csv(file)))[1:]
        return array("q", (line for line, text in enumerate(file, 1) if text.strip()))


def scan(path: Path) -> Scanned:
    """Reads a text file row by row, as far as it can be read. Rows of CSV are only looked at."""
    kind = format_of(path)
    try:
        with opened(path) as file:
            if kind == CSV:
                yield from _scan_csv(file)
            elif is_list(path):
                rows = parse_exact(Shallow(file).read())
                yield from _typed((number, row, None) for number, row in enumerate(rows))
            elif kind in (JSON, LINES):
                texts = (text for text in file if text.strip())
                yield from _typed((number, *_parsed(text)) for number, text in enumerate(texts))
    except (OSError, EOFError, ValueError):  # cut off: what the reader says of the file stands
        return


def _csv(file: IO[bytes]) -> Iterator[tuple[int, list[str]]]:
    """The fields of each row that has any, with the line on which it begins."""
    lines = csv.reader(io.TextIOWrapper(file, "utf-8", errors="replace", newline=""))
    begins = 1
    for fields in lines:
        if fields:
            yield begins, fields
        begins = lines.line_num + 1


def _scan_csv(file: IO[bytes]) -> Scanned:
    rows = (fields for _, fields in _csv(file))
    columns = next(rows, [])
    for number, fields in enumerate(rows):
        if len(fields) != len(columns):
            yield number, None, f"{len(fields)} fields, where the header has {len(columns)}"


def _parsed(text: bytes) -> tuple[Any, str | None]:
    try:
        return parse_exact(Shallow(io.BytesIO(text)).read().decode("utf-8-sig")), None
    except UnicodeDecodeError as error:
        return None, f"not UTF-8: {error.reason} at byte {error.start} of the line"
    except ValueError as error:
        return None, f"broken JSON: {error}"


def _typed(rows: Iterable[tuple[int, Any, str | None]]) -> Scanned:
    """The rows, of which those are wrong that are no objects or hold another type than an earlier one."""
    seen: Seen = {}
    for number, row, problem in rows:
        if problem is None and not isinstance(row, dict):
            problem = f"{kind_of(row)}, not an object"
        if problem is None:
            problem = next(other_kinds(row, number, seen), None) or _unheld(row)
        yield number, row if problem is None else None, problem


def _unheld(row: dict[str, Any]) -> str | None:
    """What no table holds: halves of characters, numbers beyond 64 bits."""
    try:
        pa.array([row])
    except (pa.ArrowException, OverflowError, ValueError) as error:
        return f"cannot be read: {error}"
    return None
