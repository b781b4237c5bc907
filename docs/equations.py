"""The page of tests: each algorithm's equation and the tests that hold it against it.

A test names its pages by a mark, whose words may hold the test's parameters:

    @pytest.mark.equation("kl/{kind}")

An alias of the config is as good as the name, and so is a name with the + of a straight-through form.
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
"""Marks of tests that `make test` leaves out, and where they run."""

_COLLECTS_WITHIN_S = 240


@dataclass(frozen=True)
class Check:
    """A test of an algorithm, with one set of its parameters.

    Attributes:
        page: as the mark names it.
        file: from the root.
        test: the function's name.
        says: the first paragraph of its docstring, one line.
        where: what leaves it out of `make test`, in words.
        verl: whether it compares with verl's function.
    """

    page: str
    file: str
    test: str
    says: str
    where: str
    verl: bool


class _Collector:
    """A plugin of pytest that keeps what the marks say."""

    def __init__(self) -> None:
        self.found: list[Check] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.found = [check for item in session.items for check in checks_of(item)]


def checks_of(item: pytest.Item) -> Iterator[Check]:
    """One for each page that the test's marks name."""
    assert isinstance(item, pytest.Function), item
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    where = [words for mark, words in _ELSEWHERE.items() if item.get_closest_marker(mark)]
    for mark in item.iter_markers("equation"):
        for name in mark.args:
            yield Check(
                page=name.format(**parameters),
                file=os.path.relpath(item.path, ROOT),
                test=item.originalname,
                says=" ".join((item.function.__doc__ or "").split("\n\n")[0].split()),
                where=", ".join(where),
                verl=item.get_closest_marker("verl") is not None,
            )


def collected(folder: Path = ROOT / "tests") -> list[Check]:
    """The checks of a folder's tests, by pytest's own collection in a process of its own.

    Raises:
        RuntimeError: the tests cannot be collected; with pytest's words.
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
            raise RuntimeError(f"the tests cannot be collected:\n{done.stdout}\n{done.stderr}")
        return [Check(**check) for check in json.loads(out.read_text(encoding="utf-8"))]


def by_page(entries: list[Entry], checks: list[Check]) -> dict[str, list[Check]]:
    """The checks of each entry, by the path of its page; none where nothing checks it.

    Raises:
        ValueError: a mark names no page.
    """
    pages = {f"{entry.kind.folder}/{name}": entry.path for entry in entries for name in _names(entry)}
    found: dict[str, list[Check]] = {entry.path: [] for entry in entries}
    for check in checks:
        if check.page not in pages:
            raise ValueError(f"no page '{check.page}', which {check.file}::{check.test} is marked with")
        found[pages[check.page]].append(check)
    return found


def _names(entry: Entry) -> list[str]:
    return [name + plus for name in (entry.name, *entry.aliases) for plus in ("", "+")]


def page(entries: list[Entry], checks: list[Check]) -> str:
    """The page, in Markdown."""
    found = by_page(entries, checks)
    own, verl = ({(c.file, c.test) for c in checks if c.verl == is_verl} for is_verl in (False, True))
    introduction = _INTRODUCTION.format(algorithms=len(entries), tests=len(own), verl=len(verl))
    parts = ["# Tests of the equations", introduction]
    for _, same in groupby(entries, key=lambda entry: entry.kind.folder):
        members = list(same)
        title = members[0].kind.singular
        parts.append(f"## {title[0].upper()}{title[1:]}")
        for entry in members:
            parts += [f"### [`{entry.name}`]({entry.path})", *shown(entry.said)]
            parts.append(_listed([check for check in found[entry.path] if not check.verl]))
            like_verl = [check for check in found[entry.path] if check.verl]
            parts += [f"Equal to verl's:\n\n{_listed(like_verl)}"] if like_verl else []
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """Each of {algorithms} algorithms with its equation, and the tests that hold it to that.

{tests} tests compare values or gradients with a slow reference written from the equation, or with numbers
worked by hand. {verl} more, "equal to verl's", compare with verl's own function (`make test-verl`).
`make docs` makes this page from the tests' marks."""


def shown(said: Docstring) -> list[str]:
    """An equation and its symbols, in Markdown."""
    parts = [f"```text\n{said.equation}\n```"] if said.equation else []
    return [*parts, f"Where: {said.symbols}."] if said.symbols else parts


def _listed(checks: list[Check]) -> str:
    """File by file, each test once."""
    lines = []
    ordered = sorted(dict.fromkeys(checks), key=lambda check: check.file)
    for file, members in groupby(ordered, key=lambda check: check.file):
        lines.append(f"- [{file}]({os.path.relpath(ROOT / file, FOLDER)})")
        for name, same in groupby(members, key=lambda check: check.test):
            first = next(same)
            where = f" ({first.where})" if first.where else ""
            says = f": {first.says.rstrip('.:')}" if first.says else ""
            lines.append(f"  - `{name}`{where}{says}")
    return "\n".join(lines)


def _main(out: str, *files: str) -> int:
    collector = _Collector()
    options = ["--collect-only", "-q", "-m", "equation", "-p", "no:cacheprovider", "-c", "pyproject.toml"]
    code = pytest.main([*options, *files], plugins=[collector])
    Path(out).write_text(json.dumps([asdict(check) for check in collector.found]), encoding="utf-8")
    return int(code)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
