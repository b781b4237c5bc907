"""The programs in the README, docs/from-python.md and docs/extend/worker.md do what the text says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.e2e.shop import SOURCES
from tests.support.tiny import make_model


def python(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (SOURCES / page).read_text(), re.DOTALL)


@pytest.mark.slow
def test_the_program_of_ones_own_on_ray(
    tmp_path: Path, ray_cluster: None, capfd: pytest.CaptureFixture[str]
) -> None:
    blocks = python("docs/extend/worker.md")
    (program,) = [block for block in blocks if "RayBackend" in block]
    file = tmp_path / "program.py"
    file.write_text(program)
    runpy.run_path(str(file), run_name="__main__")
    shown = re.search(r"print\(.*\)  # (.*)", program)
    assert shown is not None
    assert shown[1] in capfd.readouterr().out.splitlines()


@pytest.mark.slow
def test_the_first_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, step_by_step = python("docs/from-python.md")
    (readme,) = python("README.md")
    assert set(readme.splitlines()) <= set(first.splitlines())
    program = (first + step_by_step).replace(
        "path/to/model", str(make_model(tmp_path / "model", max_position_embeddings=1024))
    )
    assert program.count("steps=100, ") == 1
    file = tmp_path / "first.py"
    file.write_text(program.replace("steps=100, ", "steps=3, ").replace("val=rows", "steps=1, val=rows"))
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(file))
    assert names["run"].steps == 3
    assert (tmp_path / "my-model" / "config.json").is_file()
    assert [row["step"] for row in names["trainer"].run.metrics] == [0, 1]
