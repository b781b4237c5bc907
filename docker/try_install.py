"""Run the install steps of a Dockerfile without a container program.

    python docker/try_install.py docker/Dockerfile.cpu --build-arg TORCH_FROM=

The COPY and RUN lines run in empty folders that replace the WORKDIRs, in a new virtual environment of this
Python. Everything is deleted afterwards. Steps that need root (apt-get, useradd) and lines about the image
itself (FROM, USER, CMD …) are listed as not run. ENV PIP_* is ignored, so pip's cache is used. The last RUN
line of our Dockerfiles is their smoke test.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDS_ROOT = ("apt-get", "useradd")


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the word and the rest of each instruction; join continued lines, skip comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word.upper(), " ".join(rest.split())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    given = dict(pair.split("=", 1) for pair in options.build_arg)
    with tempfile.TemporaryDirectory(prefix="tandem-image-") as folder:
        return _try(options.dockerfile.read_text(encoding="utf-8"), given, Path(folder))


def _try(text: str, given: dict[str, str], folder: Path) -> int:
    print(f"a virtual environment of Python {sys.version.split()[0]}", flush=True)
    venv.create(folder / "venv", with_pip=True, symlinks=True)
    work = folder
    variables = {**os.environ, "PATH": f"{folder / 'venv' / 'bin'}:{os.environ['PATH']}"}
    for word, rest in instructions(text):
        if word == "ARG":
            name, _, default = rest.partition("=")
            variables[name] = given.get(name, " ".join(shlex.split(default)))
        elif word == "ENV":
            pairs = (pair.split("=", 1) for pair in shlex.split(rest))
            variables |= {name: value for name, value in pairs if not name.startswith("PIP_")}
        elif word == "WORKDIR":
            work = folder / rest.lstrip("/")
            work.mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            _copy(shlex.split(rest), work)
        elif word == "RUN" and not rest.startswith(NEEDS_ROOT):
            began = time.monotonic()
            print(f"RUN {rest}", flush=True)
            status = subprocess.run(["sh", "-ec", rest], cwd=work, env=variables, check=False).returncode
            print(f"  status {status}, {time.monotonic() - began:.0f} s", flush=True)
            if status != 0:
                return 1
        else:
            print(f"not run: {word} {rest}", flush=True)
    return 0


def _copy(words: list[str], work: Path) -> None:
    *sources, target = words
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, work / target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, work / target)


if __name__ == "__main__":
    sys.exit(main())
