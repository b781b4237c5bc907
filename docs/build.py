"""Builds the site into build/site, from the pages, by Zensical, and looks at what came out.

    make docs            (python -m docs.build)

Whatever Zensical warns of is an error, and so are a link that leads nowhere and anything that a browser would
fetch from elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from docs import equations
from docs.entries import ROOT
from docs.equations import Check
from docs.links import SOURCES, outside_fences, place_of, rewritten
from docs.nav import NAV, REST, Part
from docs.pages import Page, pages, source

BUILD = ROOT / "build"
_HERE = Path(__file__).parent
_WITHIN_S = 300
_SHIM = "https://unpkg.com/iframe-worker/shim"
_FOLDER = re.compile(r'href="(\.(?:/?\.\.)*|\.\.(?:/\.\.)*)"')
_SHIM_HERE = "assets/javascripts/worker.js"
_FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


def build(checks: Iterable[Check], folder: Path = BUILD) -> Path:
    """Builds the site.

    Args:
        checks: the tests of algorithms, for their page.
        folder: its `pages` gets the pages in Markdown, and its `site` the site.

    Raises:
        ValueError: what is wrong, all of it.
    """
    site = folder / "site"
    for old in (folder / "pages", site, folder / ".cache"):
        shutil.rmtree(old, ignore_errors=True)
    all_pages = pages(checks)
    _stage(all_pages, folder / "pages")
    toml = (_HERE / "zensical.toml").read_text(encoding="utf-8")
    nav = f"nav = {_toml(navigation(all_pages))}\n"
    (folder / "zensical.toml").write_text(toml.replace("[project.theme]", f"{nav}\n[project.theme]", 1))
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_WITHIN_S,
        check=False,
    )
    if done.returncode:
        raise ValueError(f"the site cannot be built:\n{done.stdout}\n{done.stderr}")
    _stay_here(site)
    if wrong := list(faults(site)):
        raise ValueError("\n".join(["the site is not as it should be:", *wrong]))
    return site


def _stage(all_pages: Mapping[str, Page], folder: Path) -> None:
    """Writes the pages, and the files of the repository that they link to."""
    files: set[str] = set()
    for place, page in all_pages.items():
        _write(folder / place, outside_fences(rewritten(page, all_pages, files), _nested))
    for file in sorted(files):
        place = place_of(file)
        if place.startswith(SOURCES):
            _write(folder / place, source(ROOT / file))
        else:
            _write(folder / place, (ROOT / file).read_text(encoding="utf-8"))
    shutil.copy(_HERE / "site.css", folder / "site.css")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _nested(prose: str) -> str:
    """Lists within lists, and what goes on below an item, with the four blanks that Python's Markdown wants;
    a blank line before a list that follows a paragraph's line."""
    prose = re.sub(
        r"^((?: {2})+)(?=[-*] |\S)",
        lambda found: found[1] * 2 if len(found[1]) < 4 else found[1],
        prose,
        flags=re.M,
    )
    return re.sub(r"^(?![-*|\s]|\d+\. )(.+)\n(?=- )", r"\1\n\n", prose, flags=re.M)


def navigation(all_pages: Mapping[str, Page]) -> list[object]:
    """The navigation as Zensical wants it; a page that is not there yet is left out."""
    named = set(_named(NAV))
    folders = tuple(name for name in named if name.endswith("/"))
    rest = [place for place in all_pages if place not in named and not place.startswith(folders)]
    return list(_items(NAV, all_pages, named, rest))


def _named(parts: Iterable[Part]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, str):
            yield part
        else:
            yield from _named(part[1])


def _items(
    parts: Iterable[Part], all_pages: Mapping[str, Page], named: set[str], rest: list[str]
) -> Iterator[object]:
    for part in parts:
        if isinstance(part, tuple):
            if below := list(_items(part[1], all_pages, named, rest)):
                yield {part[0]: below}
        elif part == REST:
            yield from rest
        elif part.endswith("/"):
            yield from _folder(
                [name for name in all_pages if name.startswith(part) and name not in named], part
            )
        elif part in all_pages:
            yield part


def _folder(places: list[str], folder: str) -> Iterator[object]:
    """The pages of a folder, those of a folder within it below its name."""
    below: dict[str, list[object]] = {}
    for place in places:
        name, _, rest = place.removeprefix(folder).partition("/")
        if rest:
            below.setdefault(name.replace("_", " ").capitalize(), []).append(place)
        else:
            yield place
    yield from ({name: members} for name, members in below.items())


def _toml(value: object) -> str:
    """A list of texts and tables of one entry, as TOML."""
    match value:
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            return f"{{ {', '.join(f'{_toml(name)} = {_toml(each)}' for name, each in value.items())} }}"
    return f'"{value}"'


def _stay_here(site: Path) -> None:
    """Puts a script of our own in the place of the one that pages would fetch, and the first page in that of
    its folder, which a browser would list."""
    shutil.copy(_HERE / "worker.js", site / _SHIM_HERE)
    for file in site.rglob("*.html"):
        way = os.path.relpath(site / _SHIM_HERE, file.parent)
        text = _FOLDER.sub(r'href="\1/index.html"', file.read_text("utf-8").replace(_SHIM, way))
        file.write_text(text, encoding="utf-8")


class _Html(HTMLParser):
    """What a page links to, what it fetches, and where links to it may lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.prose: list[str] = []
        self._skip = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in _FETCHED and given.get("rel") != "canonical" and given.get(_FETCHED[tag]):
            self.fetched.append(given[_FETCHED[tag]])
        self._skip += tag in ("pre", "code", "script", "style", "svg")

    def handle_endtag(self, tag: str) -> None:
        self._skip -= tag in ("pre", "code", "script", "style", "svg")

    def handle_data(self, data: str) -> None:
        if not self._skip:
            self.prose.append(data)


_RAW = re.compile(r"^\s*(?:[-*] \S|\|.* \| .*\||#{1,6} |```)|\]\(\S+\)", re.M)
"""Markdown that was not made into anything."""


def faults(site: Path) -> Iterator[str]:
    """What is wrong with a built site: links, anchors, what is fetched from elsewhere, Markdown left over."""
    files = {
        path.relative_to(site).as_posix(): _Html(path.read_text("utf-8")) for path in site.rglob("*.html")
    }
    for name, html in files.items():
        if name == "404.html":
            continue
        yield from (
            f"{name}: fetches {url}" for url in html.fetched if urlsplit(url).scheme or url.startswith("//")
        )
        for url in html.links:
            if fault := _fault(site, name, url, files):
                yield f"{name}: {fault}"
        if left := _RAW.search("".join(html.prose)):
            yield f"{name}: Markdown that is left over: {left[0].strip()!r}"


def _fault(site: Path, name: str, url: str, files: Mapping[str, _Html]) -> str | None:
    parts = urlsplit(url)
    if parts.scheme:
        good = parts.scheme in ("http", "https", "mailto") and (parts.netloc or parts.scheme == "mailto")
        return None if good else f"no address: {url}"
    target = os.path.normpath(os.path.join(os.path.dirname(name), parts.path)) if parts.path else name
    if target not in files:
        return None if (site / target).is_file() else f"a link leads nowhere: {url}"
    missing = parts.fragment and unquote(parts.fragment) not in files[target].ids
    return f"no such anchor: {url}" if missing else None


def main() -> None:
    site = build(equations.collected())
    built = list(site.rglob("*.html"))
    links = sum(len(_Html(path.read_text("utf-8")).links) for path in built)
    print(f"wrote {len(built)} pages to {site.relative_to(ROOT)}; {links} links checked")


if __name__ == "__main__":
    main()
