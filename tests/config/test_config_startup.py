"""Loading and refusing a config is quick, and needs no torch."""

from __future__ import annotations

import subprocess
import sys
import time

PROGRAM = """
import sys
from tandem.config import derived, load_train_config
from tandem.errors import ConfigErrors
try:
    derived(load_train_config(None, sys.argv[1:]).config)
except ConfigErrors as errors:
    print(len(errors.errors))
heavy = {"torch", "transformers", "numpy", "ray", "pyarrow"} & set(sys.modules)
assert not heavy, heavy
"""


def run(*overrides: str) -> tuple[str, float]:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *overrides], capture_output=True, text=True, check=True
    )
    return done.stdout, time.monotonic() - start


def test_a_sound_config(required):
    out, seconds = run(*required)
    assert out == ""
    assert seconds < 2


def test_errors(required):
    out, seconds = run(*required, "trainer.nnodes=two", "data.foo=1", "trainer.test_freq=3")
    assert out == "3\n"
    assert seconds < 2
