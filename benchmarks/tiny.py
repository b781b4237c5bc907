"""The mode `--tiny` of the scripts in this folder, and the environments of peers.

A tiny run takes seconds. It goes the whole way of its script with small sizes, on a CPU, and leaves no result
file. Its figures mean nothing. Where a peer's environment is missing, Tandem's side runs alone.
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
"""Sizes of a small warm start, by their names in `tandem.demo.program`."""


def arguments(parser: argparse.ArgumentParser, **small: Any) -> argparse.Namespace:
    """Read the command line, with `--tiny` among its options.

    Args:
        small: defaults that count with `--tiny`; a value that is given counts before them. What has a
            default for `--out` or `--folder` gets a temporary folder instead.
    """
    parser.add_argument("--tiny", action="store_true", help="a try in seconds: small sizes, no result file")
    if "--tiny" in sys.argv[1:]:
        scratch = tempfile.TemporaryDirectory(prefix="tiny-")
        atexit.register(scratch.cleanup)
        places = {"out": Path(scratch.name, "results.json"), "folder": Path(scratch.name, "runs")}
        parser.set_defaults(**{name: path for name, path in places.items() if parser.get_default(name)})
        parser.set_defaults(**small)
    return parser.parse_args()


def peer(name: str, *, tiny: bool) -> bool:
    """Return whether a peer takes part; where its environment is missing, only a tiny run goes on."""
    if (ROOT / ".peers" / name / ".installed").exists():
        return True
    if not tiny:
        sys.exit(f"{name}'s environment is missing: run `make peers` first")
    print(f"{name}: skipped, its environment is missing; `make peers` makes it", flush=True)
    return False


def small_demo() -> Any:
    """Return a context in which the demo makes few problems and a short warm start."""
    return mock.patch.multiple("tandem.demo.program", **SMALL_DEMO)
