"""Tiny random models of each supported architecture, saved as Hugging Face folders."""

import pytest

from tests.models.small import CONFIGS, save


@pytest.fixture(scope="session", params=list(CONFIGS))
def model_folder(request, tmp_path_factory):
    return save(CONFIGS[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def qwen2_folder(tmp_path_factory):
    return save(CONFIGS["qwen2"](), tmp_path_factory.mktemp("qwen2"))
