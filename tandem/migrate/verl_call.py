"""Interpret a script's call of verl: the arguments of verl's trainer, and the command around the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tandem.errors import ConfigError
from tandem.migrate.script import Call
from tandem.texts import parse_json, parse_yaml

_TRAINERS = ("verl.trainer.main_ppo", "verl.trainer.main_ppo_v0", "recipe.dapo.main_dapo")
"""Programs whose overrides `tandem train` accepts. Since verl 0.9, the first program samples like the last.
"""

_OTHER_TRAINERS = (
    (
        "sft_trainer",
        "use `tandem sft` to train on example responses; `tandem config show --sft` lists its keys",
    ),
    ("main_generation", "use `tandem generate` to generate responses to a file of prompts"),
    ("main_eval", "use `tandem eval` to score responses"),
)
_VALUELESS = ("--no-wait", "--verify", "--log-color", "--log-style", "-v", "--verbose")
_SUBMITTED = {
    "--address": "the run starts on this machine; set trainer.cluster.address to join a Ray cluster",
    "--no-wait": "the run stays in this terminal",
    "--working-dir": "the run starts in this folder, and nothing is uploaded",
    "--submission-id": "the run is identified by its folder, not by an id",
}


@dataclass(frozen=True)
class VerlCall:
    """The interpretation of a call of verl's trainer.

    Attributes:
        arguments: the words after the trainer: Hydra's options and overrides.
        folder: the working folder.
        variables: the environment variables to set, in addition to this process's environment.
        around: sentences about the command around the call, such as a submission through Ray.
    """

    arguments: tuple[str, ...]
    folder: str
    variables: dict[str, str]
    around: tuple[str, ...]


def understood(call: Call) -> VerlCall:
    """Return the interpretation of a call.

    Raises:
        ConfigError: the call is of a program of verl other than its trainer of policies, or its runtime
            environment cannot be read.
    """
    words, folder, variables = list(call.words), call.folder, dict(call.variables)
    around: list[str] = []
    if words[0] == "ray":
        words, options = _submission(words)
        folder = str(Path(folder, options["--working-dir"])) if "--working-dir" in options else folder
        environment = _runtime_environment(call.folder, options)
        variables |= {str(name): str(value) for name, value in (environment.get("env_vars") or {}).items()}
        around = [
            f"ray job submit {option}: {_SUBMITTED.get(option, 'ignored')}."
            for option in options
            if not option.startswith("--runtime-env")
        ]
        around += [
            f"ray job submit, {name} of the runtime environment: ignored."
            for name in environment
            if name not in ("env_vars", "working_dir")
        ]
    return VerlCall(tuple(_after_entry(words)), folder, variables, tuple(around))


def _submission(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command that `ray job submit` received, and the options of `ray job submit` itself."""
    options: dict[str, str] = {}
    rest = words[words.index("submit") + 1 :] if "submit" in words else words[1:]
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        takes = not equals and name not in _VALUELESS and rest and not rest[0].startswith("-")
        options[name] = rest.pop(0) if takes else value
    return rest, options


def _runtime_environment(folder: str, options: dict[str, str]) -> dict[str, Any]:
    if text := options.get("--runtime-env-json"):
        try:
            found = parse_json(text)
        except ValueError as error:
            raise ConfigError("this is not JSON", field="--runtime-env-json", got=text) from error
    elif file := options.get("--runtime-env"):
        try:
            found = parse_yaml(Path(folder, file).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError("cannot be read", field="--runtime-env", got=str(error)) from error
    else:
        return {}
    return found if isinstance(found, dict) else {}


def _after_entry(words: Sequence[str]) -> Sequence[str]:
    for place, word in enumerate(words):
        alone = len(word) < 4 and word.startswith("-") and word.endswith("m")  # also -um
        module = words[place + 1] if alone and place + 1 < len(words) else word.removeprefix("-m")
        found = module.removesuffix(".py").replace("/", ".")
        if not (alone or word.startswith("-m") or word.endswith(".py")):
            continue
        if found.endswith(_TRAINERS):
            return words[place + (2 if alone else 1) :]
        if any(part in f".{found}" for part in (".verl.", ".recipe.")):
            raise _another(found)
    raise _another(" ".join(words[:4]))


def _another(name: str) -> ConfigError:
    remedy = next((said for part, said in _OTHER_TRAINERS if part in name), None)
    return ConfigError(
        "Tandem has no counterpart of this program"
        if remedy is None
        else "this is not the trainer of policies",
        field="--from-verl",
        got=name,
        expected="verl.trainer.main_ppo",
        remedy=remedy or "pass its overrides to `tandem train` directly; it lists those that have no effect",
    )
