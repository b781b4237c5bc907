"""Loading or refusing a config imports no torch, no arrays and no terminal, and parses no source code."""

import subprocess
import sys

PROGRAM = """
import sys
from tandem.config.sizes import derived
from tandem.config.load import load_train_config
from tandem.errors import ConfigErrors
try:
    derived(load_train_config(None, sys.argv[1:]).config)
except ConfigErrors as errors:
    print(len(errors.errors))
heavy = {"torch", "transformers", "numpy", "ray", "pyarrow", "rich"} & set(sys.modules)
heavy |= {"docs.readers", "tandem.config.explain"} & set(sys.modules)
assert not heavy, heavy
"""


def run(*overrides: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *overrides], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_sound_config(required):
    assert run(*required) == ""


def test_errors(required):
    assert run(*required, "trainer.nnodes=two", "data.foo=1", "trainer.test_freq=3") == "3\n"
