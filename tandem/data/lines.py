"""Find the line of each row in a text file, and the problem in a file that cannot be parsed."""

from __future__ import annotations

import csv
import io
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from tandem.data.depth import Shallow
from tandem.data.formats import CSV, JSON, LINES, format_of, is_list, listed, opened, parsed_lines
from tandem.data.values import checked_rows
from tandem.tasks import is_task
from tandem.texts import parse_exact

Scanned = Iterator[tuple[int, dict[str, Any] | None, str | None]]
"""An iterator of (row number from 0, row or description of the row's problem)."""


def line_numbers(path: Path) -> Sequence[int]:
    """Return, for each row, the number of its first line, counted from 1.

    The result is empty for formats without lines.
    """
    kind = format_of(path)
    if is_task(str(path)) or kind not in (CSV, LINES, JSON) or is_list(path):
        return ()
    with opened(path) as file:
        if kind == CSV:
            return array("q", (line for line, _ in _csv(file)))[1:]
        return array("q", (line for line, text in enumerate(file, 1) if text.strip()))


def scan(path: Path) -> Scanned:
    """Read a text file row by row, as far as possible.

    CSV rows are only checked; the yielded row is None.
    """
    kind = format_of(path)
    try:
        with opened(path) as file:
            if kind == CSV:
                lines = (fields for _, fields in _csv(file))
                columns = next(lines, [])
                for number, fields in enumerate(lines):
                    if len(fields) != len(columns):
                        yield number, None, f"{len(fields)} fields, but the header has {len(columns)}"
            elif kind in (JSON, LINES):
                rows = listed(file) if is_list(path) else parsed_lines(file, _parsed)
                for number, row, wrong in checked_rows(rows):
                    problem = wrong or _storage_problem(row)
                    yield number, None if problem else row, problem
    except (OSError, EOFError, ValueError):  # the file is incomplete; the reader's own error says so
        return


def _csv(file: IO[bytes]) -> Iterator[tuple[int, list[str]]]:
    """Yield the fields of each row that is not empty, with the number of its first line."""
    lines = csv.reader(io.TextIOWrapper(file, "utf-8", errors="replace", newline=""))
    begins = 1
    for fields in lines:
        if fields:
            yield begins, fields
        begins = lines.line_num + 1


def _parsed(text: bytes) -> Any:
    return parse_exact(Shallow(io.BytesIO(text)).read().decode("utf-8-sig"))


def _storage_problem(row: dict[str, Any]) -> str | None:
    """Return why no table can store a row, such as an unpaired surrogate or a number beyond 64 bits."""
    try:
        pa.array([row])
    except (pa.ArrowException, OverflowError, ValueError) as error:
        return f"cannot be read: {error}"
    return None
