"""Generate the page of tests: the equation of each algorithm and the tests that check it.

A test names the algorithm's page with a mark, which may contain parameters of the test:

    @pytest.mark.equation("kl/{kind}")

The mark may also use an alias from the config, or a name with the + of a straight-through form.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from docs.docstring import Docstring
from docs.entries import FOLDER, ROOT, Entry

PAGE = "tests.md"

_MARK = "mark.equation("
_ELSEWHERE = {"gpu": "on a GPU", "slow": "in `make test-full`"}
"""Marks of tests that `make test` skips, and where these tests run."""

_COLLECTS_WITHIN_S = 240


@dataclass(frozen=True)
class Check:
    """A test of an algorithm with one set of parameters.

    Attributes:
        page: the page, as the mark names it.
        file: the path from the root of the repository.
        test: the name of the test function.
        summary: the first paragraph of the test's docstring, on one line.
        where: where the test runs if `make test` skips it, in words; empty otherwise.
        verl: whether the test compares with verl's function.
    """

    page: str
    file: str
    test: str
    summary: str
    where: str
    verl: bool


class _Collector:
    """A pytest plugin that collects the marks of all tests."""

    def __init__(self) -> None:
        self.found: list[Check] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.found = [check for item in session.items for check in checks_of(item)]


def checks_of(item: pytest.Item) -> Iterator[Check]:
    """Yield one check for each page that the test's marks name."""
    assert isinstance(item, pytest.Function), item
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    where = [words for mark, words in _ELSEWHERE.items() if item.get_closest_marker(mark)]
    for mark in item.iter_markers("equation"):
        for name in mark.args:
            yield Check(
                page=name.format(**parameters),
                file=os.path.relpath(item.path, ROOT),
                test=item.originalname,
                summary=" ".join((item.function.__doc__ or "").split("\n\n")[0].split()),
                where=", ".join(where),
                verl=item.get_closest_marker("verl") is not None,
            )


def collected(folder: Path = ROOT / "tests") -> list[Check]:
    """Collect the checks of the tests in a folder, with pytest in a separate process.

    Raises:
        RuntimeError: pytest cannot collect the tests; the message has pytest's output.
    """
    files = sorted(folder.rglob("test_*.py"))
    marked = [str(file) for file in files if _MARK in file.read_text(encoding="utf-8")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with TemporaryDirectory() as answer:
        out = Path(answer) / "checks.json"
        done = subprocess.run(
            [sys.executable, "-m", "docs.equations", str(out), *marked],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_COLLECTS_WITHIN_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"pytest cannot collect the tests:\n{done.stdout}\n{done.stderr}")
        return [Check(**check) for check in json.loads(out.read_text(encoding="utf-8"))]


def by_page(entries: list[Entry], checks: list[Check]) -> dict[str, list[Check]]:
    """Return the checks of each entry by the path of its page; the list may be empty.

    Raises:
        ValueError: a mark names a page that does not exist.
    """
    pages = {f"{entry.kind.folder}/{name}": entry.path for entry in entries for name in _names(entry)}
    found: dict[str, list[Check]] = {entry.path: [] for entry in entries}
    for check in checks:
        if check.page not in pages:
            raise ValueError(f"{check.file}::{check.test} names the unknown page '{check.page}'")
        found[pages[check.page]].append(check)
    return found


def _names(entry: Entry) -> list[str]:
    return [name + plus for name in (entry.name, *entry.aliases) for plus in ("", "+")]


def page(entries: list[Entry], checks: list[Check]) -> str:
    """Return the page in Markdown."""
    found = by_page(entries, checks)
    own, verl = ({(c.file, c.test) for c in checks if c.verl == is_verl} for is_verl in (False, True))
    introduction = _INTRODUCTION.format(algorithms=len(entries), tests=len(own), verl=len(verl))
    parts = ["# Tests of the equations", introduction]
    for _, same in groupby(entries, key=lambda entry: entry.kind.folder):
        members = list(same)
        title = members[0].kind.singular
        parts.append(f"## {title[0].upper()}{title[1:]}")
        for entry in members:
            parts += [f"### [`{entry.name}`]({entry.path})", *shown(entry.docstring)]
            parts.append(_listed([check for check in found[entry.path] if not check.verl]))
            like_verl = [check for check in found[entry.path] if check.verl]
            parts += [f"Compared with verl's function:\n\n{_listed(like_verl)}"] if like_verl else []
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """The equation of each of the {algorithms} algorithms, and the tests that check it.

{tests} tests compare values or gradients with a slow reference that follows the equation, or with numbers
calculated by hand. {verl} more tests compare with verl's own function (`make test-verl`).
`make docs` generates this page from marks in the tests."""


def shown(docstring: Docstring) -> list[str]:
    """Return the equation and its symbols in Markdown."""
    parts = [f"```text\n{docstring.equation}\n```"] if docstring.equation else []
    return [*parts, f"Where: {docstring.symbols}."] if docstring.symbols else parts


def _listed(checks: list[Check]) -> str:
    """Return a list of the tests by file, each test once."""
    lines = []
    ordered = sorted(dict.fromkeys(checks), key=lambda check: check.file)
    for file, members in groupby(ordered, key=lambda check: check.file):
        lines.append(f"- [{file}]({os.path.relpath(ROOT / file, FOLDER)})")
        for name, same in groupby(members, key=lambda check: check.test):
            first = next(same)
            where = f" ({first.where})" if first.where else ""
            summary = f": {first.summary.rstrip('.:')}" if first.summary else ""
            lines.append(f"  - `{name}`{where}{summary}")
    return "\n".join(lines)


def _main(out: str, *files: str) -> int:
    collector = _Collector()
    options = ["--collect-only", "-q", "-m", "equation", "-p", "no:cacheprovider", "-c", "pyproject.toml"]
    code = pytest.main([*options, *files], plugins=[collector])
    Path(out).write_text(json.dumps([asdict(check) for check in collector.found]), encoding="utf-8")
    return int(code)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
