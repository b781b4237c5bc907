"""Loading or refusing a config imports no torch, no arrays and no terminal, and parses no source code."""

import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("given", ["", "trainer.nnodes=two data.foo=1 trainer.test_freq=3"])
def test_a_config_is_loaded_or_refused_without_heavy_imports(required, given):
    command = [sys.executable, "-c", PROGRAM, *required, *given.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ("3\n" if given else "")
