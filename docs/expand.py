"""Expand the directives in handwritten pages: comments that the site replaces.

<!-- help: NAME -->        the output of `tandem NAME --help`
<!-- drawing: NAME -->     a diagram of docs/drawings.py
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


_MAKE: Mapping[str, Callable[[str], str]] = {"help": help_of, "drawing": drawings.drawing}
