"""The program in the README does what the README says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.e2e.shop import SOURCES


def test_the_program_of_ones_own_on_ray(
    tmp_path: Path, ray_cluster: None, capfd: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (SOURCES / "README.md").read_text(), re.DOTALL)
    (program,) = [block for block in blocks if "RayBackend" in block]
    file = tmp_path / "program.py"
    file.write_text(program)
    runpy.run_path(str(file), run_name="__main__")
    shown = re.search(r"print\(.*\)  # (.*)", program)
    assert shown is not None
    assert shown[1] in capfd.readouterr().out.splitlines()
