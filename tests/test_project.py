"""Rules for the whole repository that no linter checks."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FOLDERS = ("tandem", "tests", "benchmarks", "examples", "docs")
SUFFIXES = {".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|opt|root|Users|work)/\w")
LEFTOVER = re.compile(r"\b(TO" r"DO|FIX" r"ME|HA" r"CK|XX" r"X)\b|raise NotImplemented" r"Error")


def _files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)
    yield from sorted(path for path in ROOT.iterdir() if path.suffix in SUFFIXES or path.name == "Makefile")
    yield ROOT / ".ci" / "run"


FILES = list(_files())
SOURCES = [path for path in FILES if path.suffix == ".py"]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _lines_matching(pattern: re.Pattern[str], files: list[Path]) -> list[str]:
    return [
        f"{_name(path)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


def test_there_is_something_to_check():
    assert {"tandem/errors.py", "tests/test_project.py"} <= {_name(path) for path in SOURCES}


def test_no_file_is_too_long():
    lengths = {_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_no_function_is_too_long():
    long = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long[f"{_name(path)}:{node.lineno} {node.name}"] = lines
    assert long == {}


def test_no_path_of_one_machine():
    assert _lines_matching(MACHINE_PATH, FILES) == []


def test_nothing_is_left_unfinished():
    assert _lines_matching(LEFTOVER, SOURCES) == []


def test_test_files_have_different_names():
    names = [path.name for path in SOURCES if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))


def _requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(line) for group in groups for line in group]


@pytest.mark.parametrize("requirement", _requirements(), ids=str)
def test_constraints_pin_a_version_that_the_project_admits(requirement):
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)])
