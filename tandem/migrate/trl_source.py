"""Read TRL's settings from a Python file, which is parsed but never run, or from a command line."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tandem.errors import ConfigError
from tandem.migrate.trl_table import TABLES
from tandem.texts import parse_yaml

_CONFIGS = {name.removesuffix("Config").lower(): name for name in TABLES}
_TRAINERS = {f"{name.removesuffix('Config')}Trainer": name for name in TABLES}
_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
_LORA |= {"target_modules": "lora_target_modules", "target_parameters": "lora_target_parameters"}
_LORA |= {"use_rslora": "use_rslora", "use_dora": "use_dora"}
_UNKNOWN = object()


@dataclass
class Given:
    """TRL's settings as the user wrote them.

    Attributes:
        name: the TRL class that has most of the settings.
        settings: a dict from field to value.
        implied: a dict from field to a value that follows from other code of the user.
        unread: a dict from a field whose value is not a literal to the text of its expression.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    implied: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)


def read_python(path: str) -> Given:
    """Return the settings in a Python file.

    Values are read if they are literals, or names that the top level of the file sets to a literal.

    Raises:
        ConfigError: the file does not exist, is not Python, or contains none of TRL's classes.
    """
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise ConfigError("cannot be read as Python", field=path, got=str(error)) from error
    names = dict(_constants(tree))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [_called(call) for call in calls]
    kinds = [name for name in found if name in TABLES] or [_TRAINERS[n] for n in found if n in _TRAINERS]
    if not kinds:
        raise ConfigError(
            "this file creates none of TRL's configs", field=path, expected=", ".join([*TABLES, *_TRAINERS])
        )
    given = Given(kinds[0])
    for call, name in zip(calls, found, strict=True):
        if name == given.name or name in ("ModelConfig", "ScriptArguments"):
            _take(given, call, names, {})
        elif name == "LoraConfig":
            given.implied |= {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}  # peft's
            _take(given, call, names, _LORA)
        elif _TRAINERS.get(name) == given.name:
            _take_trainer(given, call, names)
    return given


def read_words(words: Sequence[str]) -> Given:
    """Return the settings in a command line of TRL: `[trl] grpo --name value …`.

    Raises:
        ConfigError: no trainer is named, or a word belongs to no option.
    """
    rest = [word for word in words if word != "trl"]
    if not rest or rest[0] not in _CONFIGS:
        raise ConfigError(
            "this is not a trainer of TRL",
            got=rest[0] if rest else "nothing",
            expected=f"FILE.py, or one of {', '.join(_CONFIGS)} and its options",
        )
    given = Given(_CONFIGS[rest.pop(0)])
    for name, values in options(rest):
        if name == "config":
            given.settings = {**_file(str(values[0])), **given.settings}
        else:
            given.settings[name] = typed(values)
    return given


def options(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield options and their values as argparse splits them: `--name a b`, `--name=a`, `--name`.

    Raises:
        ConfigError: a word belongs to no option.
    """
    name, values = None, []
    for word in words:
        if word.startswith("--"):
            if name is not None:
                yield name, values
            name, equals, value = word[2:].partition("=")
            name, values = name.replace("-", "_"), [value] if equals else []
        elif name is None:
            raise ConfigError("this word belongs to no option", got=word, expected="--name value")
        else:
            values.append(word)
    if name is not None:
        yield name, values


def typed(values: Sequence[str]) -> Any:
    """Parse a value as a number, boolean, None, list or mapping; return any other text unchanged."""
    found = [_typed(value) for value in values]
    return True if not found else found[0] if len(found) == 1 else found


def _typed(text: str) -> Any:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    if text[:1] in "[{":
        try:
            return parse_yaml(text)
        except (ValueError, yaml.YAMLError):
            return text
    return text


def _file(path: str) -> dict[str, Any]:
    try:
        tree = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError("cannot be read as YAML", field="--config", got=str(error)) from error
    if not isinstance(tree, dict):
        raise ConfigError("the file is not a mapping", field="--config", got=path)
    return {str(name): _typed(value) if isinstance(value, str) else value for name, value in tree.items()}


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = _literal(node.value, {})
            if value is not _UNKNOWN:
                yield node.targets[0].id, value


def _literal(node: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return _UNKNOWN


def _take(given: Given, call: ast.Call, names: dict[str, Any], other: dict[str, str]) -> None:
    for keyword in call.keywords:
        name = other.get(str(keyword.arg), keyword.arg or "**")
        value = _literal(keyword.value, names)
        if value is _UNKNOWN:
            given.unread[name] = ast.unparse(keyword.value)
        elif not other or keyword.arg in other:
            given.settings[name] = value


def _take_trainer(given: Given, call: ast.Call, names: dict[str, Any]) -> None:
    """Record the model and the reward functions that are passed to a trainer."""
    for keyword in call.keywords:
        value = _literal(keyword.value, names)
        if keyword.arg == "model":
            if isinstance(value, str):
                given.settings["model_name_or_path"] = value
            else:
                given.unread["model"] = ast.unparse(keyword.value)
        elif keyword.arg == "reward_funcs":
            many = keyword.value.elts if isinstance(keyword.value, ast.List | ast.Tuple) else [keyword.value]
            given.settings["reward_funcs"] = [
                text if isinstance(text := _literal(one, names), str) else ast.unparse(one) for one in many
            ]
        elif keyword.arg in ("train_dataset", "eval_dataset"):
            given.unread[str(keyword.arg)] = ast.unparse(keyword.value)
