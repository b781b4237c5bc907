"""Safe output on a terminal.

Data, prompts, responses and rewards may contain control sequences, characters that change the writing
direction, and rich's markup. All such texts go through this module, which makes them harmless.
"""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any, TextIO

from rich.console import Console

from tandem.hidden import masked

_UNSAFE = chain(
    (code for code in range(0x20) if chr(code) not in "\n\t"),  # C0
    range(0x7F, 0xA0),  # DEL, C1
    (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)),  # lines, directions
    range(0xD800, 0xE000),  # surrogates, which cannot be encoded
)
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in _UNSAFE}


def printable(text: str) -> str:
    r"""Return the text with escaped control characters, such as \x1b. Line ends and tabs stay.

    Secret values are replaced by their placeholders.
    """
    return masked(text).translate(_ESCAPES)


def say(sentence: str, *, file: TextIO | None = None, end: str = "\n") -> None:
    """Print a sentence and flush; by default to standard output."""
    print(printable(sentence), file=file or sys.stdout, end=end, flush=True)


def warn(sentence: str) -> None:
    """Print a sentence to standard error and flush."""
    say(sentence, file=sys.stderr)


def plain_console(**options: Any) -> Console:
    """Return a console that prints texts unchanged: no markup, no emoji codes, no colors by content.

    Args:
        **options: more arguments of rich's Console.
    """
    return Console(markup=False, emoji=False, highlight=False, **options)
