import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "tandem" / "viewer" / "static"


def test_the_wheel_has_every_file_of_the_page(tmp_path):
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    page = {str(path.relative_to(ROOT)): path.read_bytes() for path in STATIC.rglob("*") if path.is_file()}
    assert {"tandem/viewer/static/index.html", "tandem/viewer/static/vendor/LICENSE.htm"} <= page.keys()
    assert {name: held.get(name) for name in page} == page


def test_every_vendored_file_is_named_with_its_licence():
    vendor = STATIC / "vendor"
    listed = (vendor / "VENDORED").read_text()
    for path in vendor.iterdir():
        assert path.name == "VENDORED" or path.name in listed, path.name


def test_own_modules_of_the_page_are_small():
    for path in STATIC.glob("*.js"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 400, path.name
        assert max(map(len, lines)) <= 130, path.name
