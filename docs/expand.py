"""Directives of pages that are written by hand: comments, which the site has something in place of.

<!-- help: NAME -->        what `tandem NAME --help` prints
<!-- drawing: NAME -->     a drawing of docs/drawings.py
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from unittest.mock import patch

from docs import drawings
from tandem.cli.main import main

_DIRECTIVE = re.compile(r"^<!-- (help|drawing): (\S+) -->$", re.M)


def expanded(text: str) -> str:
    """A page with what its directives ask for."""
    return _DIRECTIVE.sub(lambda found: _MAKE[found[1]](found[2]), text)


def help_of(command: str) -> str:
    """What `--help` of a command prints, in a terminal of 100 columns without colours."""
    said = io.StringIO()
    plain = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    with redirect_stdout(said), patch.dict("os.environ", plain), suppress(SystemExit):  # argparse exits
        main([*command.split(), "--help"])
    return f"```text\n{said.getvalue().strip()}\n```"


_MAKE: Mapping[str, Callable[[str], str]] = {"help": help_of, "drawing": drawings.drawing}
