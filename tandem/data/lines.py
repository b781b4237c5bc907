"""Where the rows of text files stand, and what is wrong with the lines of one that cannot be read."""

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
from tandem.data.values import looked_at
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
                lines = (fields for _, fields in _csv(file))
                columns = next(lines, [])
                for number, fields in enumerate(lines):
                    if len(fields) != len(columns):
                        yield number, None, f"{len(fields)} fields, where the header has {len(columns)}"
            elif kind in (JSON, LINES):
                rows = listed(file) if is_list(path) else parsed_lines(file, _parsed)
                for number, row, wrong in looked_at(rows):
                    problem = wrong or _unheld(row)
                    yield number, None if problem else row, problem
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


def _parsed(text: bytes) -> Any:
    return parse_exact(Shallow(io.BytesIO(text)).read().decode("utf-8-sig"))


def _unheld(row: dict[str, Any]) -> str | None:
    """What no table holds: halves of characters, numbers beyond 64 bits."""
    try:
        pa.array([row])
    except (pa.ArrowException, OverflowError, ValueError) as error:
        return f"cannot be read: {error}"
    return None
