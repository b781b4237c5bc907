"""Convert links that are relative to files of the repository into links within the site."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath

from docs.entries import ROOT
from docs.pages import Page

SOURCES = "source"
"""The folder of the site for files of the repository that pages link to."""
FIGURES = "figures"
"""The folder of the site for pictures."""

_LINK = re.compile(r"(`+)[^`]*?\1|(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))")
_EXTERNAL = re.compile(r"[a-z]+:|#")
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Apply `change` to the text before, between and after the code fences of a page."""
    out: list[str] = []
    fence = ""
    prose: list[str] = []
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line)
        if found and not fence:
            out += [change("".join(prose)), line]
            prose, fence = [], found[1]
        elif fence:
            out.append(line)
            fence = "" if line.strip() == fence else fence
        else:
            prose.append(line)
    return "".join([*out, change("".join(prose))])


def targets(text: str) -> Iterator[str]:
    """Yield the link targets of a page, outside code fences."""
    found: list[str] = []

    def collect(prose: str) -> str:
        found.extend(match[3] for match in _LINK.finditer(prose) if match[3])
        return prose

    outside_fences(text, collect)
    yield from found


def rewritten(page: Page, pages: Mapping[str, Page], files: set[str]) -> str:
    """Return a page's text with links that work within the site.

    Args:
        page: the page.
        pages: all pages of the site.
        files: a set; the files of the repository that the page links to are added to it.

    Raises:
        ValueError: the target of a link does not exist.
    """
    places = {other.origin: other.place for other in pages.values()}

    def changed(match: re.Match[str]) -> str:
        if not match[3] or _EXTERNAL.match(match[3]):
            return match[0]
        path, hash_, anchor = match[3].partition("#")
        origin = os.path.normpath(os.path.join(os.path.dirname(page.origin), path))
        place = places.get(origin)
        if place is None:
            if not (ROOT / origin).exists():
                raise ValueError(f"{page.origin}: the target of this link does not exist: {match[3]}")
            files.add(origin)
            place, hash_, anchor = place_of(origin), "", ""
        way = os.path.relpath(place, os.path.dirname(page.place) or ".")
        return f"{match[2]}{way}{hash_}{anchor}{match[4]}"

    return outside_fences(page.text, lambda prose: _LINK.sub(changed, prose))


def place_of(file: str) -> str:
    """Return the place in the site of a repository file that is not a page."""
    if PurePosixPath(file).suffix in (".svg", ".png"):
        return f"{FIGURES}/{PurePosixPath(file).name}"
    return f"{SOURCES}/{file}.md"
