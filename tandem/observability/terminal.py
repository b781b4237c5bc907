"""What a terminal is shown. Data, prompts, responses and rewards may hold control sequences, marks that turn
the direction of writing, and rich's markup: here, and here alone, they become harmless."""

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
    range(0xD800, 0xE000),  # halves of characters, which no encoding has
)
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in _UNSAFE}


def printable(text: str) -> str:
    """The text with its control characters written out, as in \\x1b; line ends and tabs stay. Hidden values
    give way to their marks."""
    return masked(text).translate(_ESCAPES)


def say(sentence: str, *, file: TextIO | None = None, end: str = "\n") -> None:
    """Prints to the user at once; to standard output unless told."""
    print(printable(sentence), file=file or sys.stdout, end=end, flush=True)


def warn(sentence: str) -> None:
    """Prints to standard error at once."""
    say(sentence, file=sys.stderr)


def plain_console(**options: Any) -> Console:
    """A console that takes texts as they are: no markup, no emoji codes, no colours by content.

    Args:
        options: rich's other ones.
    """
    return Console(markup=False, emoji=False, highlight=False, **options)
