"""The mode `--tiny` of the scripts in this folder, and the check for the environments of peers.

A tiny run takes seconds. It runs its whole script with small sizes on a CPU and leaves no result file. Its
figures mean nothing. If a peer's environment is missing, only Tandem's side runs.
"""

from __future__ import annotations

import argparse
import atexit
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
SMALL_DEMO = {"SFT_STEPS": 2, "SFT_BATCH": 16, "TRAIN_PROBLEMS": 64, "VALIDATION_PROBLEMS": 16}
"""The sizes of a small warm start, by their names in `tandem.demo.program`."""


def arguments(parser: argparse.ArgumentParser, **small: Any) -> argparse.Namespace:
    """Parse the command line, with the additional option `--tiny`.

    Args:
        parser: the parser of the script.
        small: defaults that apply with `--tiny`; options on the command line override them. If `--out` or
            `--folder` has a default, a temporary path replaces the default.
    """
    parser.add_argument(
        "--tiny", action="store_true", help="try the script in seconds: small sizes, no result file"
    )
    if "--tiny" in sys.argv[1:]:
        scratch = tempfile.TemporaryDirectory(prefix="tiny-")
        atexit.register(scratch.cleanup)
        places = {"out": Path(scratch.name, "results.json"), "folder": Path(scratch.name, "runs")}
        parser.set_defaults(**{name: path for name, path in places.items() if parser.get_default(name)})
        parser.set_defaults(**small)
    return parser.parse_args()


def peer(name: str, *, tiny: bool) -> bool:
    """Return whether a peer takes part; without its environment, a run that is not tiny exits."""
    if (ROOT / ".peers" / name / ".installed").exists():
        return True
    if not tiny:
        sys.exit(f"{name}'s environment is missing: run `make peers` first")
    print(f"{name}: skipped because its environment is missing; create it with `make peers`", flush=True)
    return False


def small_demo() -> Any:
    """Return a context in which the demo makes few problems and a short warm start."""
    return mock.patch.multiple("tandem.demo.program", **SMALL_DEMO)
