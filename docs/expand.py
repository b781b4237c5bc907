"""Expand the directives in handwritten pages: comments that the site replaces.

<!-- help: NAME -->        the output of `tandem NAME --help`
<!-- drawing: NAME -->     a diagram of docs/drawings.py
<!-- table: models -->      the table of architectures
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from html import escape
from unittest.mock import patch

from docs import drawings
from tandem.cli import models
from tandem.cli.main import main
from tandem.models.families import families

_DIRECTIVE = re.compile(r"^<!-- (help|drawing|table): (\S+) -->$", re.M)


def expanded(text: str) -> str:
    """Return the text of a page with its directives expanded."""
    return _DIRECTIVE.sub(lambda found: _MAKE[found[1]](found[2]), text)


def help_of(command: str) -> str:
    """Return the `--help` output of a command, as in a terminal of 100 columns without colours."""
    printed = io.StringIO()
    plain = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    # argparse raises SystemExit
    with redirect_stdout(printed), patch.dict("os.environ", plain), suppress(SystemExit):
        main([*command.split(), "--help"])
    return f"```text\n{printed.getvalue().strip()}\n```"


def model_table(_: str) -> str:
    """Return the table of architectures, and the reasons for what is missing."""
    known = families()
    rows = [models.COLUMNS, ["---"] * len(models.COLUMNS), *map(models.cells, known)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    reasons = "\n".join(f"- `{family.name}`: {escape(family.reason)}" for family in known if family.reason)
    return f"{models.summary(known)}.\n\n{table}\n\n## What is missing\n\n{reasons}"


_MAKE: Mapping[str, Callable[[str], str]] = {
    "help": help_of,
    "drawing": drawings.drawing,
    "table": model_table,
}
