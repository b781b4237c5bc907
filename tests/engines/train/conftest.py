import pytest

from tests.engines.train import synthetic
from tests.engines.train.models import save_models


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return synthetic.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def scorer_folder(tmp_path_factory):
    return synthetic.save_scorer(tmp_path_factory.mktemp("scorer"))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))
