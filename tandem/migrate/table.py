"""A translation as a table: what was given under other names, and what became of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table

from tandem.observability.terminal import plain_console, printable

Verdict = Literal["renamed", "acts", "ignored", "refused"]
ORDER: tuple[Verdict, ...] = ("refused", "renamed", "acts", "ignored")
_LONGEST = 60
_FILE_WIDTH = 200


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one setting.

    Attributes:
        name: as it was given: a key, an option, an environment variable.
        value: what was given.
        verdict: renamed: another key here; acts: under its own name; ignored: nothing here depends on it;
            refused: it would change the run, and cannot.
        sentence: the other key and value, or the reason.
    """

    name: str
    value: Any
    verdict: Verdict
    sentence: str


def print_table(title: str, rows: Iterable[Row], *, to_stderr: bool = True) -> None:
    """Prints rows by verdict, refusals first; the reasons of rows that share one are printed once.

    Args:
        title: stands above.
        rows: in any order.
        to_stderr: where to.
    """
    table = Table(title=title, title_justify="left", show_lines=False, pad_edge=False, box=None)
    for name in ("given", "value", "here", "which"):
        table.add_column(name, overflow="fold", no_wrap=name == "here")
    last = None
    for row in sorted(rows, key=lambda row: (ORDER.index(row.verdict), row.sentence, row.name)):
        same = (row.verdict, row.sentence) == last
        shown = printable(str(row.value))
        shown = shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"
        table.add_row(printable(row.name), shown, row.verdict, '"' if same else printable(row.sentence))
        last = (row.verdict, row.sentence)
    if table.row_count:
        stream = sys.stderr if to_stderr else sys.stdout
        plain_console(file=stream, width=None if stream.isatty() else _FILE_WIDTH).print(table)
