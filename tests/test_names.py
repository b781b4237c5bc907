import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tandem.loading import MOVED

ROOT = Path(__file__).parents[1]
PLACES = (".ci", "benchmarks", "docker", "docs", "examples", "tandem")
LEFT_OUT = {"static", "results", "__pycache__"}  # libraries of the site; generated files
SUFFIXES = {"", ".cpu", ".cuda", ".md", ".py", ".sbatch", ".sglang"}
SUFFIXES |= {".sh", ".toml", ".txt", ".vllm", ".yaml", ".yml"}
OTHERS = {"tandem.log", "tandem.onednn_linear", "tandem.trainer.build"}
"""A file's name, an operator's, and that of a module of earlier commits."""
MADE = {"docs/algorithms", *(f"examples/{name}.md" for name in ("cluster", "recipes", "reward_model"))}
"""Parts of the site."""
VERLS = "docs/verl-tests.md"  # it names verl's files
MODULE = re.compile(r"(?<![\w./@-])(?:benchmarks|tandem)(?:\.[A-Za-z_]\w*)+(?::[A-Za-z_]\w*)?(?![\w/-])")
PROGRAM = re.compile(r"-m ((?:benchmarks|docs|tests)(?:\.\w+)+)")
FILE = re.compile(r"(?<![\w./$}-])(?:\.ci|benchmarks|docker|docs|examples|tandem|tests)/[\w./-]*\w")
EXTRAS = re.compile(r"(?:(?<=['\" ])\.|\btandem)\[([a-z][\w,-]+)\]")


def texts() -> Iterator[Path]:
    for place in PLACES:
        for path in sorted((ROOT / place).rglob("*")):
            if path.is_file() and path.suffix in SUFFIXES and not LEFT_OUT & set(path.parts):
                yield path
    yield from (ROOT / name for name in ("CONTRIBUTING.md", "Makefile", "README.md", "pyproject.toml"))


def found(pattern: re.Pattern[str]) -> dict[str, str]:
    """Return the matches of the pattern in all texts, each with the place of its first occurrence."""
    names: dict[str, str] = {}
    for path in texts():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for match in pattern.finditer(line):
                names.setdefault(match[match.lastindex or 0], f"{path.relative_to(ROOT)}:{number}")
    return names


@cache
def resolves(name: str) -> bool:
    """Return whether a dotted name is a module or an attribute of one. Only packages are imported."""
    if any(name == old or name.startswith(f"{old}.") for old in MOVED):
        return True
    parts = name.replace(":", ".").split(".")
    place, size = ROOT, 0
    while size < len(parts) and (place / parts[size]).is_dir():
        place, size = place / parts[size], size + 1
    if size < len(parts) and (place / f"{parts[size]}.py").is_file():
        place, size = place / f"{parts[size]}.py", size + 1
    attributes = [] if parts[-1].startswith("__") else parts[size:]
    source = place / "__init__.py" if place.is_dir() else place
    return not attributes or (source.is_file() and defines(ast.parse(source.read_text()).body, attributes))


def defines(body: list[ast.stmt], attributes: list[str]) -> bool:
    """Return whether statements define the first name, and a class of that name the next one."""
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == attributes[0]:
            inherits = bool(node.bases)
            return len(attributes) == 1 or inherits or defines(node.body, attributes[1:])
        if attributes[0] in made_by(node):
            return True
    return False


def made_by(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    names: set[str] = set()
    for part in ast.walk(node):  # also for `if TYPE_CHECKING:`
        if isinstance(part, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in part.names}
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            names.add(part.id)
    return names


def test_modules_and_their_attributes():
    names = found(MODULE)
    assert len(names) > 400
    assert {name: place for name, place in names.items() if not resolves(name)}.keys() == OTHERS


def test_programs():
    assert {name: place for name, place in found(PROGRAM).items() if not resolves(name)} == {}


def test_files():
    missing = {name: place for name, place in found(FILE).items() if not (ROOT / name).exists()}
    assert {name for name, place in missing.items() if not place.startswith(VERLS)} == MADE


def test_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = project["optional-dependencies"]
    wanted = {name: place for names, place in found(EXTRAS).items() for name in names.split(",")}
    assert wanted
    assert {name: place for name, place in wanted.items() if name not in known} == {}


def test_a_name():
    names = ("assembly", "assembly:build_ppo", "build", "assembly.nothing")
    assert [resolves(f"tandem.trainer.{name}") for name in names] == [True, True, False, False]
