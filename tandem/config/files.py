"""Rules about files and folders: what is named exists, or will be written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from tandem.config.root import TrainConfig
from tandem.config.rule import Rule
from tandem.config.schema import value_at
from tandem.config.section import Section
from tandem.errors import ConfigError


def keep_best(config: Any, changed: frozenset[str]) -> Iterator[ConfigError]:
    """Checkpoints judged by a validation metric need validations."""
    name = config.trainer.keep_best
    if name is not None and name.startswith("val/") and config.trainer.test_freq < 1:
        yield ConfigError(
            "judges checkpoints by a validation, and there is none",
            field="trainer.keep_best",
            got=name,
            remedy="set trainer.test_freq to a divisor of trainer.save_freq",
        )


def resume(config: Any, changed: frozenset[str]) -> Iterator[ConfigError]:
    path = config.trainer.resume_from_path
    if config.trainer.resume_mode != "resume_path":
        return
    if path is None or not os.path.isdir(path):
        yield ConfigError(
            "missing" if path is None else "no such folder",
            field="trainer.resume_from_path",
            got=path,
            expected="a checkpoint folder, for trainer.resume_mode=resume_path",
            remedy="name one, or set trainer.resume_mode=auto",
        )


def files(*names: str) -> Rule[Any]:
    """Every one of these keys that is set names existing files."""

    def check(config: Section, changed: frozenset[str]) -> Iterator[ConfigError]:
        for name in names:
            value = value_at(config, name)
            for path in (value,) if isinstance(value, str) else value or ():
                if not os.path.isfile(path):
                    yield ConfigError("no such file", field=name, got=path, remedy="check the path")

    return Rule(names, check)


def reward_file(config: Any, changed: frozenset[str]) -> Iterator[ConfigError]:
    """A reward function's file exists; the dotted name of a module is looked up when it is loaded."""
    field, path = "custom_reward_function.path", config.custom_reward_function.path
    if path is not None and (path.endswith(".py") or os.sep in path) and not os.path.isfile(path):
        yield ConfigError("no such file", field=field, got=path, remedy="check the path")


def own_code(name: str) -> Rule[TrainConfig]:
    """A user's own function in a file: the file exists. What is in it is checked when it is loaded."""

    def check(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
        yield from code_file(name, value_at(config, name))

    return Rule((name,), check)


def code_file(field: str, reference: str) -> Iterator[ConfigError]:
    """An error if `reference`, the value at `field`, is a name in a Python file that is not there."""
    file, colon, _ = reference.rpartition(":")
    if colon and file.endswith(".py") and not os.path.isfile(file):
        yield ConfigError("no such file", field=field, got=file, remedy="check the path before the colon")


def model(name: str, marker: str) -> Rule[Any]:
    """A key, if not inherited, names a local folder with the file `marker`."""

    def check(config: Section, changed: frozenset[str]) -> Iterator[ConfigError]:
        folder = value_at(config, name)
        if name not in changed or os.path.isfile(os.path.join(folder, marker)):
            return
        remedy = "check the path; a model of the Hugging Face hub must be downloaded first"
        yield ConfigError(
            "not a model folder" if os.path.isdir(folder) else "no such folder",
            field=name,
            got=folder,
            expected=f"a Hugging Face folder with {marker}",
            remedy=remedy,
        )

    return Rule((name,), check)
