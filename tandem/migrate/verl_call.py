"""What a script's call of verl asks for: the words after verl's trainer, and what stood around it."""

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
"""Programs whose overrides `tandem train` takes; since verl 0.9 the first samples as the last does."""

_OTHER_TRAINERS = (
    ("sft_trainer", "`tandem sft` trains on answers; `tandem config show --sft` has its keys"),
    ("main_generation", "`tandem generate` answers a file of prompts"),
    ("main_eval", "`tandem eval` scores answers"),
)
_VALUELESS = ("--no-wait", "--verify", "--log-color", "--log-style", "-v", "--verbose")
_SUBMITTED = {
    "--address": "the run is a process of this machine; trainer.cluster.address joins a Ray cluster",
    "--no-wait": "the run stays in this terminal",
    "--working-dir": "the run starts in this folder, from which nothing is uploaded",
    "--submission-id": "the run has a folder, not an id",
}


@dataclass(frozen=True)
class VerlCall:
    """A call of verl's trainer, understood.

    Attributes:
        arguments: the words after it: Hydra's options and overrides.
        folder: where it starts.
        variables: environment variables that it starts with beside those of this process.
        around: one sentence each about what stood around it, as a submission through Ray.
    """

    arguments: tuple[str, ...]
    folder: str
    variables: dict[str, str]
    around: tuple[str, ...]


def understood(call: Call) -> VerlCall:
    """What a call asks for.

    Raises:
        ConfigError: another program of verl than its trainer of policies; a runtime environment that
            cannot be read.
    """
    words, folder, variables = list(call.words), call.folder, dict(call.variables)
    around: list[str] = []
    if words[0] == "ray":
        words, options = _submission(words)
        folder = str(Path(folder, options["--working-dir"])) if "--working-dir" in options else folder
        environment = _runtime_environment(call.folder, options)
        variables |= {str(name): str(value) for name, value in (environment.get("env_vars") or {}).items()}
        around = [
            f"ray job submit {option}: {_SUBMITTED.get(option, 'nothing to act on here')}."
            for option in options
            if not option.startswith("--runtime-env")
        ]
        around += [
            f"ray job submit, {name} of the runtime environment: nothing to act on here."
            for name in environment
            if name not in ("env_vars", "working_dir")
        ]
    return VerlCall(tuple(_after_entry(words)), folder, variables, tuple(around))


def _submission(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command that `ray job submit` was given, and its own options."""
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
            raise ConfigError("not JSON", field="--runtime-env-json", got=text) from error
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
        "a program that Tandem has no counterpart of" if remedy is None else "not the trainer of policies",
        field="--from-verl",
        got=name,
        expected="verl.trainer.main_ppo",
        remedy=remedy
        or "give its overrides to `tandem train` themselves: what acts here runs, the rest is named",
    )
