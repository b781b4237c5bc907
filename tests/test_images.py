import configparser
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINS = dict(line.split("==") for line in CONSTRAINTS if not line.startswith("#"))
build = runpy.run_path(str(ROOT / "docker" / "build.py"))
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
parse = runpy.run_path(str(ROOT / "docker" / "try_install.py"))["instructions"]


def test_lines_are_joined_and_comments_left_out():
    text = "# head\nARG A=1\nRUN one \\\n    # between\n    && two\n\ncopy a b\n"
    assert list(parse(text)) == [("ARG", "A=1"), ("RUN", "one && two"), ("COPY", "a b")]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_an_image(path):
    steps = list(parse(path.read_text(encoding="utf-8")))
    words = [word for word, _ in steps]
    installs = " ".join(rest for word, rest in steps if word == "RUN" and "pip install" in rest)
    for name in ("torch", "transformers"):
        assert set(re.findall(rf"\b{name}==([\d.]+)", installs)) <= {PINS[name]}
    assert re.search(r"\btorch==", installs)
    assert steps[words.index("USER")] == ("USER", "tandem")
    *_, smoke = (place for place, word in enumerate(words) if word == "RUN")
    assert smoke > words.index("USER")
    assert "tandem config show" in steps[smoke][1]
    sent = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for _, rest in (step for step in steps if step[0] == "COPY"):
        *sources, _target = rest.split()
        assert all((ROOT / source).exists() and f"!{source}" in sent for source in sources)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.suffix[1:])
def test_the_base_of_an_image(path):
    assert build["base_of"](path, []) == "python:3.11-slim-bookworm"
    assert build["base_of"](path, ["PYTHON=3.12", "TORCH_FROM="]) == "python:3.12-slim-bookworm"


def test_pip_settings_are_mounted_for_the_build_alone(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    options = list(build["mounts"](tmp_path, {"find-links": f"{wheels} /not/there", "timeout": "9"}))
    assert options == [f"--volume={tmp_path}/pip.conf:/etc/pip.conf:ro", f"--volume={wheels}:{wheels}:ro"]
    written = configparser.ConfigParser()
    written.read(tmp_path / "pip.conf")
    assert dict(written["global"]) == {"find-links": f"{wheels} /not/there", "timeout": "9"}
