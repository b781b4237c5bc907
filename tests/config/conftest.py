"""Fixtures: a data file and a model folder that suffice for the config, loaders, and a check of refusals."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.config import load as loading
from tandem.config.load import Loaded
from tandem.config.root import TrainConfig
from tandem.config.schema import value_at
from tandem.errors import ConfigError, ConfigErrors
from tests.support.words import full, words


def as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: as_lists(inner) for name, inner in value.items()}
    return [as_lists(inner) for inner in value] if isinstance(value, tuple) else value


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
def load(required: list[str], train_file: str, model: str) -> Load:
    """Return a function that loads a config from the required keys and from words, which may be short.

    Words after `sft: `, `rm: ` or `generate: ` are of that command.
    """

    def run(*texts: str) -> Loaded[Any]:
        found = re.match(r"(?:(\w+): )?(.*)", "\n".join(texts), re.DOTALL)
        command = found[1] or "train"
        needed = [f"data.train_files={train_file}", f"model.path={model}"]
        if command == "generate":
            needed = [f"data.path={train_file}", "data.output_path=out.parquet", f"model.path={model}"]
        needed = required if command == "train" else needed
        given = words(*found[2].split("\n"))
        return getattr(loading, f"load_{command}_config")(None, [*needed, *given])

    return run


@pytest.fixture
def errors(load: Load) -> Errors:
    """Return a function that loads such a config and returns its errors by field, one each."""

    def run(*texts: str) -> dict[str, ConfigError]:
        with pytest.raises(ConfigErrors) as caught:
            load(*texts)
        found = {str(error.field): error for error in caught.value.errors}
        assert len(found) == len(caught.value.errors), str(caught.value)
        return found

    return run


@pytest.fixture
def refused(errors: Errors) -> Callable[[str, str], None]:
    """Return a function that checks that words are refused with one error that has all texts (`a // b`).

    The error is at the last of the given keys unless the first text is `at: KEY`. It has the value as given
    unless a text begins with `got:`. `only if` is of a key without effect.
    """

    def check(given: str, said: str) -> None:
        texts = [full(text) for text in said.split(" // ")]
        last, _, value = words(given)[-1].partition("=")
        at = texts.pop(0)[4:] if said.startswith("at: ") else last
        (error,) = errors(given).values()
        assert error.field == at
        shown = " ".join(str(error).split())
        for text in texts:
            if text.startswith("only if "):
                assert (error.message, error.expected) == ("has no effect", f"set {text}")
                assert str(error.remedy).endswith(("remove this key", "remove this entry"))
            assert text in shown
        if at == last and error.got is not None and "got: " not in said:
            start = re.escape(value.strip("'\""))
            assert re.match(rf"\"?{start}(?!\w)", str(error.got), re.IGNORECASE), shown

    return check


@pytest.fixture
def loaded(load: Load) -> Callable[[str, str], None]:
    """Return a function that loads a config from words and checks the values that other words name."""

    def check(given: str, values: str) -> None:
        config = load(given).config
        for word in words(values):
            name, _, text = word.partition("=")
            value = value_at(config, name)
            assert as_lists(value) == yaml.safe_load(text), name
            assert isinstance(value, bool) == (text in {"true", "false"}), name
            assert not isinstance(value, dict) or list(value) == list(yaml.safe_load(text)), name

    return check
