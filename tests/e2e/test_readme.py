"""The program in the README does what the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.shop import SOURCES


def test_the_program_of_ones_own(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (SOURCES / "README.md").read_text(), re.DOTALL)
    (program,) = [block for block in blocks if "RayBackend" in block]
    file = tmp_path / "program.py"
    file.write_text(program)
    environment = os.environ | {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, file], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    shown = re.search(r"print\(.*\)  # (.*)", program)
    assert shown is not None
    assert done.stdout.strip() == shown[1]
