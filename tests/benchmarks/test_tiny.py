import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.marks import slow_but
from tests.support.warm import run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
# the others start several cold processes, Ray, a browser or a compiler
QUICK = ["packing", "plan_memory", "reward_pool", "rollout_vs_hf", "sandbox"]
CHROMIUM = Path("/usr/bin/chromium")
APART = {"gpu"}  # tests/benchmarks/test_gpu_program.py runs this script
LIMIT_S = 280
# private names of PyTorch, of `os` and of named tuples
FOREIGN = {"_asdict", "_exit", "_replace", "_get_fsdp_state", "_fsdp_param_group", "_concatenate", "_track"}
FOREIGN |= {"_parameters", "_buffers"}


SCRIPTS = {path.stem for path in FOLDER.glob("*.py") if 'if __name__ == "__main__":' in path.read_text()}


def results() -> dict[str, tuple[int, int]]:
    files = {path.name: path.stat() for path in (FOLDER / "results").iterdir()}
    return {name: (status.st_size, status.st_mtime_ns) for name, status in files.items()}


@pytest.mark.parametrize("name", slow_but(QUICK, sorted(SCRIPTS - APART)))
def test_a_tiny_run(name, tmp_path):
    if name == "viewer" and not CHROMIUM.exists():
        pytest.skip("Chromium is not installed")
    before = results()
    own = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    command = [sys.executable, FOLDER / f"{name}.py", "--tiny"]
    done = run(command, timeout=LIMIT_S, start_new_session=True, **own)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.strip()
    assert results() == before


def private_names(path: Path) -> Iterator[str]:
    """Yield private names that the file does not define itself, and imports from tests."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            package = node.module.partition(".")[0]
            if package == "tests":
                yield node.module
            if package not in ("ray", "torch"):
                yield from (alias.name for alias in node.names if hidden(alias.name))
        elif isinstance(node, ast.Attribute) and hidden(node.attr) and ast.unparse(node.value) != "self":
            yield node.attr


def hidden(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in FOREIGN


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_only_public_names(path):
    assert list(private_names(path)) == []


def test_private_names_are_seen(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "from tandem.x import _a\nfrom tests.support.runs import Lab\nengine._state.step()\nself._own = 1\n"
    )
    assert sorted(private_names(path)) == ["_a", "_state", "tests.support.runs"]
