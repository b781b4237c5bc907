from pathlib import Path

import pytest

from tests.workers import roles


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return roles.make_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture
def config(folder, tmp_path):
    return roles.make_config(folder, run=tmp_path)
