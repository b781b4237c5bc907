"""All code blocks of README, pages and docstrings: Python is run, and the commands accept shell lines."""

import ast
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from docs.blocks import Block, blocks
from docs.entries import ROOT
from docs.expand import help_of
from tandem.api.training import _loaded
from tandem.cli.main import COMMANDS
from tandem.config import load as loading
from tandem.config.sources import split_arguments
from tandem.errors import ConfigError, ConfigErrors
from tests.support.tiny import make_model

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = sorted([*PAGES, *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*/README.md")])
ELSEWHERE = {
    "README.md": "tests/e2e/test_readme.py",
    "docs/from-python.md": "tests/e2e/test_readme.py",
    "docs/extend/worker.md": "tests/e2e/test_readme.py",
    "docs/your-own-algorithm.md": "tests/docs/test_own_algorithm.py",
    "docs/data.md": "tests/cli/test_data_command.py",
}
"""Pages whose Python code or sessions are run by another test, with the setup that they need."""

BEFORE_A_MODEL = {"docs/rewards.md"}
"""Pages whose Python code calls `tandem.train` with a model and rows of the reader."""

BLOCKS = [block for page in PAGES for block in blocks(page)]
LANGUAGES = {"python", "sh", "bash", "console", "text", "json", "yaml", "diff", ""}
RUNNABLE = ("python", "sh", "bash")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def of(page: Path, *languages: str) -> list[Block]:
    return [
        block for block in BLOCKS if block.page == page and block.language in languages and not block.not_run
    ]


def test_there_are_blocks_and_each_has_a_language_that_is_known():
    assert len(BLOCKS) > 120
    assert {block.language for block in BLOCKS} <= LANGUAGES


def test_what_is_not_run_has_a_reason(capsys):
    left = [f"{name(block.page)}:{block.line}: {block.not_run}" for block in BLOCKS if block.not_run]
    with capsys.disabled():
        print(f"\n{len(BLOCKS)} blocks of code, {len(left)} of which nobody runs", *left, sep="\n  ")
    assert len(left) <= 6
    assert all(len(block.not_run.split()) >= 3 for block in BLOCKS if block.not_run)


@pytest.mark.parametrize("page", [p for p in PAGES if of(p, "python") and name(p) not in ELSEWHERE], ids=name)
def test_python_runs(page, tmp_path, monkeypatch):
    """Runs the blocks of a page in order. A block that starts with a file name is saved as that file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("JUDGE_KEY", "of nobody")
    before = set(sys.modules)
    names = {"__name__": "page"} | (stand_ins(tmp_path) if name(page) in BEFORE_A_MODEL else {})
    for block in of(page, "python"):
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        code = compile("\n" * block.line + block.text, str(page), "exec")
        given = dict(names) if block.file else names  # blocks without a file share their names
        with ThreadPoolExecutor(1) as thread:  # another test's browser may keep an event loop in this thread
            thread.submit(exec, code, given).result()
    for module in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]


def stand_ins(folder: Path) -> dict[str, Any]:
    """Return the names that a page uses. `train` only does the checks before a model is loaded."""

    def train(model: Any, *, train: Any, rewards: Any) -> None:
        _loaded(model, train, None, rewards, "grpo", 1, folder / "run", {"data.max_response_length": 8})

    (folder / "my_reward.py").write_text("def right(response, answer): ...")
    return {
        "tandem": SimpleNamespace(train=train),
        "model": make_model(folder / "model", max_position_embeddings=1024),
        "rows": [{"prompt": "1+1=", "answer": "2"}],
        "short": lambda response: -len(response),
    }


@pytest.mark.parametrize("page", sorted(ELSEWHERE))
def test_pages_that_another_test_runs_are_named_there(page):
    assert Path(page).name in (ROOT / ELSEWHERE[page]).read_text(encoding="utf-8")


LOADERS = {
    name: getattr(loading, f"load_{name}_config") for name in ("train", "sft", "rm", "generate", "eval")
}
LOADERS["check"] = loading.load_train_config
ABSENT = (
    "missing",
    "this file does not exist",
    "this folder does not exist",
    "this folder has no config.json",
)
ABSENT += ("this folder has no tokenizer_config.json", "no pool", "unknown resource pool")
"""Messages about missing files: the lines on a page name files of the reader."""
OTHERS = {"git", "cd", "docker", "sbatch", "export", "ray", "srun", "for", "done", "python3", "."}
OTHERS |= {"RANK=0", "#SBATCH"}
"""Programs on pages that are not part of Tandem and are not checked."""


def lines(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command in a block."""
    waiting = ""
    for line in re.sub(r"\\\n", " ", block.text).splitlines():
        waiting += f"{line}\n"
        if re.sub(r"#.*", "", waiting).count("'") % 2:  # the quotation continues on the next line
            continue
        words, waiting = shlex.split(waiting, comments=True), ""
        if "--" in words and words[:1] != ["tandem"]:  # RANK=0 tandem node … -- tandem train …
            yield words[words.index("--") + 1 :]
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words:
            yield words


SHELL = [
    (block, words)
    for block in BLOCKS
    if block.language in ("sh", "bash") and not block.not_run
    for words in lines(block)
]


@pytest.mark.parametrize(
    ("block", "words"), SHELL, ids=[f"{name(block.page)}:{' '.join(words)[:40]}" for block, words in SHELL]
)
def test_lines_of_shell_are_ones_that_the_programs_take(block, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    program, *rest = words
    if program == "tandem":
        takes(rest)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(
            re.search(rf"^{word}:", makefile, re.M) for word in rest if "=" not in word and word != "…"
        )
    elif program in ("python", "pip"):
        assert_python(program, rest, block)
    else:
        assert program in OTHERS, words


def takes(words: list[str]) -> None:
    """Check that the command and its keys exist, the values fit, and the help has the options."""
    words = [word for word in words if "…" not in word.strip("[]")]
    command, *rest = words
    assert command in COMMANDS
    if command in LOADERS and not {"--from-verl", "--model"} & set(rest):
        only = [word for word in rest if not word.startswith("--") and word not in ("-o",)]
        accepted(command, only)
    subcommand = [command, rest[0]] if command in ("data", "runs") and rest[:1] != [] else [command]
    if command == "runs" and (not rest or rest[0] not in ("compare", "plot", "prune")):
        subcommand = [command]
    said = help_of(" ".join(subcommand))
    own = rest[: rest.index("--")] if "--" in rest else rest
    for word in own:
        if word.startswith("-") and len(word) > 1:
            assert word.split("=")[0] in said, (word, said)


def accepted(command: str, words: list[str]) -> None:
    file, overrides = split_arguments([word for word in words if "=" in word or word.endswith(".yaml")])
    known = None if file is None or not (ROOT / file).is_file() else str(ROOT / file)
    overrides = [re.sub(r"\$\w+", "grpo", word) for word in overrides]
    try:
        LOADERS[command](known, overrides)
    except ConfigErrors as errors:
        wrong = [error for error in errors.errors if not error.message.startswith(ABSENT)]
        assert wrong == []
    except ConfigError as error:
        if not error.message.startswith(ABSENT):
            raise


def assert_python(program: str, words: list[str], block: Block) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        for extra in re.findall(r"\[([\w,-]+)\]", word) if program == "pip" else ():
            assert set(extra.split(",")) <= extras.keys()
    if program == "python" and words[0].endswith(".py"):
        own = [other.file for other in BLOCKS if other.page == block.page]
        assert words[0] in own or (ROOT / words[0]).is_file(), words


def test_code_in_docstrings_is_python():
    """Checks indented blocks with an import, a class or a function; … replaces a body."""
    found = 0
    for path in sorted((ROOT / "tandem").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for block in re.findall(r"(?:^ {4,}.*\n?)+", ast.get_docstring(node) or "", re.M):
                    if re.search(r"^ *(import \w|from \S+ import|class .*:|def .*:)", block, re.M):
                        ast.parse(textwrap.dedent(block))
                        found += 1
    assert found >= 2
