"""Build the site into build/site with Zensical, and check the result.

    make docs            (python -m docs.build)

Every warning of Zensical is an error. A link without a target is an error, and so is anything that a browser
would fetch from another server.
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
    """Build the site and check it.

    Args:
        checks: the tests of algorithms, which the page of tests lists.
        folder: where to write: the Markdown pages go into `pages`, the site into `site`.

    Returns:
        The folder of the site.

    Raises:
        ValueError: the build failed or the checks found faults; the message lists all of them.
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
        raise ValueError(f"The site cannot be built:\n{done.stdout}\n{done.stderr}")
    _stay_here(site)
    if wrong := list(faults(site)):
        raise ValueError("\n".join(["The built site has these faults:", *wrong]))
    return site


def _stage(all_pages: Mapping[str, Page], folder: Path) -> None:
    """Write the pages, and the files of the repository that they link to."""
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
    """Adapt the Markdown of lists to Python-Markdown.

    Python-Markdown needs four spaces of indentation for a nested list and for further lines of an item, and a
    blank line between a paragraph and a list.
    """
    prose = re.sub(
        r"^((?: {2})+)(?=[-*] |\S)",
        lambda found: found[1] * 2 if len(found[1]) < 4 else found[1],
        prose,
        flags=re.M,
    )
    return re.sub(r"^(?![-*|\s]|\d+\. )(.+)\n(?=- )", r"\1\n\n", prose, flags=re.M)


def navigation(all_pages: Mapping[str, Page]) -> list[object]:
    """Return the navigation in Zensical's form. Pages that do not exist are left out."""
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
    """Yield the pages of a folder; the pages of a subfolder are grouped below its name."""
    below: dict[str, list[object]] = {}
    for place in places:
        name, _, rest = place.removeprefix(folder).partition("/")
        if rest:
            below.setdefault(name.replace("_", " ").capitalize(), []).append(place)
        else:
            yield place
    yield from ({name: members} for name, members in below.items())


def _toml(value: object) -> str:
    """Convert a list of strings and one-entry dicts to TOML."""
    match value:
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            return f"{{ {', '.join(f'{_toml(name)} = {_toml(each)}' for name, each in value.items())} }}"
    return f'"{value}"'


def _stay_here(site: Path) -> None:
    """Make the pages independent of other servers and of directory listings.

    A copy of Zensical's worker script replaces the script that pages would fetch from another server. Links
    to a folder become links to its index.html, because a browser that opens a file would list the folder.
    """
    shutil.copy(_HERE / "worker.js", site / _SHIM_HERE)
    for file in site.rglob("*.html"):
        way = os.path.relpath(site / _SHIM_HERE, file.parent)
        text = _FOLDER.sub(r'href="\1/index.html"', file.read_text("utf-8").replace(_SHIM, way))
        file.write_text(text, encoding="utf-8")


class _Html(HTMLParser):
    """The links of a page, the URLs that it fetches, its anchors and its prose."""

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
"""Matches Markdown that was not converted to HTML."""


def faults(site: Path) -> Iterator[str]:
    """Yield the faults of a built site: bad links and anchors, URLs to fetch, unconverted Markdown."""
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
            yield f"{name}: Markdown that was not converted: {left[0].strip()!r}"


def _fault(site: Path, name: str, url: str, files: Mapping[str, _Html]) -> str | None:
    parts = urlsplit(url)
    if parts.scheme:
        good = parts.scheme in ("http", "https", "mailto") and (parts.netloc or parts.scheme == "mailto")
        return None if good else f"not a valid address: {url}"
    target = os.path.normpath(os.path.join(os.path.dirname(name), parts.path)) if parts.path else name
    if target not in files:
        return None if (site / target).is_file() else f"the target of this link does not exist: {url}"
    missing = parts.fragment and unquote(parts.fragment) not in files[target].ids
    return f"this anchor does not exist: {url}" if missing else None


def main() -> None:
    site = build(equations.collected())
    built = list(site.rglob("*.html"))
    links = sum(len(_Html(path.read_text("utf-8")).links) for path in built)
    print(f"wrote {len(built)} pages to {site.relative_to(ROOT)}; {links} links checked")


if __name__ == "__main__":
    main()
