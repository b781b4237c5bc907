"""Read the fenced code blocks of a page, and the comment before each block.

The comment `<!-- not run: WHY -->` before a block means that no test executes the block.
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
    """A code block of a page.

    Attributes:
        page: the file of the page.
        line: the line number of the opening fence, counted from 1.
        language: the word after the opening fence.
        text: the lines between the fences.
        not_run: why no test executes the block; empty if tests execute it.
    """

    page: Path
    line: int
    language: str
    text: str
    not_run: str

    @property
    def file(self) -> str:
        """The file name that the first line gives; empty if the block is a command or program to run."""
        found = _FILE.match(self.text)
        return found[1] if found else ""


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start(2)) + 1
        yield Block(page, line, found[3], found[4], found[1] or "")
