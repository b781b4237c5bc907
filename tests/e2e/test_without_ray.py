"""Without Ray installed, one process works, and several processes are refused before any work is done."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.shop import SOURCES
from tests.support.warm import run

pytestmark = pytest.mark.e2e

PROGRAM = """
import sys
assert "ray" not in sys.modules
sys.modules["ray"] = None  # what an import of it finds where it is not installed
from tandem.cli.main import main
sys.exit(main())
"""


def tandem(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = folder.parent / "without_ray.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    return run([sys.executable, program, *words], cwd=folder, env=environment)


def test_training(shop):
    assert tandem(shop.folder, "train", *shop.short("alone")).returncode == 0
    done = tandem(shop.folder, "train", *shop.short("together", "trainer.n_gpus_per_node=2"))
    assert done.returncode == 1
    assert "Ray is not installed, and several processes need it" in done.stderr
    assert "pip install 'tandem[ray]'" in done.stderr


def test_the_demo(tmp_path):
    done = tandem(tmp_path, "demo", "--ranks", "2")
    assert done.returncode == 1
    assert "  got:      --ranks 2\n" in done.stderr
    assert list(tmp_path.iterdir()) == []
