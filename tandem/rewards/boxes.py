r"""Find the boxed answer of a response: \boxed{…}, \fbox{…}, or without braces as in \boxed 42."""

from __future__ import annotations

import re

MAX_ANSWER_CHARACTERS = 1000  # a box with more characters is ignored
MAX_TAIL_CHARACTERS = 10_000  # how many characters at the end of a response are searched for a box
MAX_BOXES = 50
"""The number of last boxes to try. Only text that was made to waste time has more unclosed boxes."""
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # a brace, or an escaped character, which does not count
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]*")
WITHOUT_BRACES = re.compile(r"[^$\n]*")
"""The content of a box without braces: the remaining formula or line."""


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete box of a text, with nested braces; None if there is none."""
    text = text[-MAX_TAIL_CHARACTERS:]
    for box in reversed(list(BOX.finditer(text))[-MAX_BOXES:]):
        content = _braced(text, box.end()) if text.startswith("{", box.end()) else _bare(text, box.end())
        if content is not None:
            return content
    return None


def _braced(text: str, brace: int) -> str | None:
    depth = 0
    for match in BRACE.finditer(text, brace, brace + 1 + MAX_ANSWER_CHARACTERS):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return text[brace + 1 : match.start()].strip()
    return None


def _bare(text: str, start: int) -> str | None:
    match = WITHOUT_BRACES.match(text, start, start + MAX_ANSWER_CHARACTERS)
    assert match is not None
    return match.group().strip() or None
