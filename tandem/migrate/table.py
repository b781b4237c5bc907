"""Print the translation of another system's settings as a table."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.table import Table

from tandem.observability.terminal import plain_console, printable
from tandem.peers.table import Reading

ORDER = ("refused", "renamed", "acts", "ignored")
_LONGEST = 60
_FILE_WIDTH = 200


def print_table(title: str, rows: Iterable[Reading]) -> None:
    """Print rows to standard error, refusals first. A reason shared by several rows is printed once.

    Args:
        title: the title above the table.
        rows: the rows, in any order.
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
        width = None if sys.stderr.isatty() else _FILE_WIDTH
        plain_console(file=sys.stderr, width=width).print(table)
