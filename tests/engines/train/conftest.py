"""A tiny model folder and a tiny scorer folder.

The jobs import `synthetic` as scripts do, so this folder is added to the import path.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import synthetic


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return synthetic.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def scorer_folder(tmp_path_factory):
    return synthetic.save_scorer(tmp_path_factory.mktemp("scorer"))
