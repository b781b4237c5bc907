"""Blocks of code in pages: what stands between fences, and what a comment before it says.

<!-- not run: WHY -->      of the next block, which no test executes
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"(?:^<!-- not run: (.+?) -->\n+)?^(`{3,})(\w*)[^\n]*\n(.*?)^\2$", re.M | re.S)
_FILE = re.compile(r"# ([\w/.-]+\.(?:py|yaml))\n")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page: where it stands.
        line: of its first fence, from 1.
        language: after the fence.
        not_run: why nobody executes it, if so.
    """

    page: Path
    line: int
    language: str
    text: str
    not_run: str

    @property
    def file(self) -> str:
        """The name of the file that it is, by its first line; none: it is something to run."""
        found = _FILE.match(self.text)
        return found[1] if found else ""


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start(2)) + 1
        yield Block(page, line, found[3], found[4], found[1] or "")
