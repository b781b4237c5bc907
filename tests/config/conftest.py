"""A data file, a model folder and a tokenizer folder as far as the config looks at them, and short forms
of loading."""

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
    """The two keys that have no default."""
    return [f"data.train_files={train_file}", f"actor_rollout_ref.model.path={model}"]


@pytest.fixture
def load(required: list[str]) -> Load:
    """Loads a training config from the required keys and some overrides."""
    return lambda *overrides: load_train_config(None, [*required, *overrides])


@pytest.fixture
def errors(required: list[str]) -> Errors:
    """The errors of loading such a config, by field; a field with two errors fails."""

    def run(*overrides: str) -> dict[str, ConfigError]:
        with pytest.raises(ConfigErrors) as caught:
            load_train_config(None, [*required, *overrides])
        found = {str(error.field): error for error in caught.value.errors}
        assert len(found) == len(caught.value.errors), str(caught.value)
        return found

    return run
