"""Tiny random models of each supported architecture, saved as Hugging Face folders."""

import shutil

import pytest
from transformers import CONFIG_MAPPING

from tests.models.small import CONFIGS, OTHER_HEADS, SHAPE, save


def saved(kind, tmp_path_factory):
    return save(CONFIG_MAPPING[kind](**SHAPE, **(CONFIGS | OTHER_HEADS)[kind]), tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="session", params=list(CONFIGS))
def model_folder(request, tmp_path_factory):
    return saved(request.param, tmp_path_factory)


@pytest.fixture(scope="session")
def qwen2_folder(tmp_path_factory):
    return saved("qwen2", tmp_path_factory)


@pytest.fixture
def folder(qwen2_folder, tmp_path):
    """Return a copy that a test may change."""
    return shutil.copytree(qwen2_folder, tmp_path / "model")
