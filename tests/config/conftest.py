"""Fixtures: a data file, a model folder and a tokenizer folder that suffice for the config, and loaders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.config.load import Loaded, load_train_config
from tandem.config.root import TrainConfig
from tandem.errors import ConfigError, ConfigErrors

Load = Callable[..., Loaded[TrainConfig]]
Errors = Callable[..., dict[str, ConfigError]]


@pytest.fixture
def train_file(tmp_path: Path) -> str:
    path = tmp_path / "train.parquet"
    path.touch()
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    return str(folder)


@pytest.fixture
def required(train_file: str, model: str) -> list[str]:
    """Return overrides for the two keys that have no default."""
    return [f"data.train_files={train_file}", f"actor_rollout_ref.model.path={model}"]


@pytest.fixture
def load(required: list[str]) -> Load:
    """Return a function that loads a training config from the required keys and some overrides."""
    return lambda *overrides: load_train_config(None, [*required, *overrides])


@pytest.fixture
def errors(required: list[str]) -> Errors:
    """Return a function that loads such a config and returns its errors by field.

    Two errors for one field fail the test.
    """

    def run(*overrides: str) -> dict[str, ConfigError]:
        with pytest.raises(ConfigErrors) as caught:
            load_train_config(None, [*required, *overrides])
        found = {str(error.field): error for error in caught.value.errors}
        assert len(found) == len(caught.value.errors), str(caught.value)
        return found

    return run
