"""Convert the arguments of the Python API to `key=value` arguments of the command line.

A command line cannot contain rows and functions. Rows and functions are written to files in the run folder,
so that the command line can start the same run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.api.rows import Rows, data_files
from tandem.errors import ConfigError
from tandem.loading import write_function

INPUTS = "inputs"
"""The subfolder of the run folder with rows and functions."""

Config = Mapping[str, Any] | str | os.PathLike[str] | None
"""A dict from config key (dotted or nested) to value, or the path of a YAML file."""
Rewards = Callable[..., Any] | str | Sequence[Any] | Mapping[Any, float] | None
"""Reward functions, as functions or as `file.py:function`: one, a list, or a dict from function to weight.

With None, the data source of each row selects a built-in reward function.
"""

ALGORITHMS = {"ppo": "gae"}
"""A dict from the name of an algorithm to its advantage estimator, if the names differ."""


def split_config(config: Config) -> tuple[str | None, dict[str, Any]]:
    """Split a config into the path of a YAML file and a dict of keys; one of the two is empty."""
    if config is None or isinstance(config, Mapping):
        return None, dict(config or {})
    return os.fspath(config), {}


def new_folder(name: str) -> str:
    """Return a run folder that does not exist yet: `runs/NAME-1` or the next free number."""
    taken = (
        int(tail) for path in Path("runs").glob(f"{name}-*") if (tail := path.name[len(name) + 1 :]).isdigit()
    )
    return str(Path("runs") / f"{name}-{max(taken, default=0) + 1}")


def words(keys: Mapping[str, Any], inputs: Path) -> list[str]:
    """Convert config keys to `key=value` arguments.

    A function is written to a file in `inputs`, and the value becomes the reference `FILE:NAME`.
    """
    given = {name: _plain(value, inputs) for name, value in keys.items() if value is not None}
    return [f"{name}={json.dumps(value)}" for name, value in given.items()]


def _plain(value: Any, inputs: Path) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(inner, inputs) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, inputs) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return reference(value, inputs) if callable(value) else value


def reference(function: Callable[..., Any], inputs: Path) -> str:
    """Write a function to a file if needed, and return `FILE:NAME`, which other processes can load."""
    path, name = write_function(function, inputs)
    return f"{path}:{name}"


def rows_keys(train: Rows, val: Rows, inputs: Path) -> dict[str, Any]:
    """Write rows to files if needed, and return the config keys that name the data files."""
    validation = None if val is None else data_files(val, inputs, "val")
    return {"data.train_files": data_files(train, inputs, "train"), "data.val_files": validation}


def reward_keys(rewards: Rewards, inputs: Path) -> dict[str, Any]:
    """Return the config keys of the reward functions.

    Raises:
        ConfigError: an entry is neither a function nor the name of a function.
    """
    found = [_reward_entry(function, weight, inputs) for function, weight in _weighted(rewards)]
    if not found:
        return {}
    for place, each in enumerate(found):
        if before := sum(one["name"] == each["name"] for one in found[:place]):
            each["label"] = f"{each['name']}_{before + 1}"
    if len(found) == 1 and found[0]["weight"] == 1.0:
        return {f"custom_reward_function.{name}": found[0][name] for name in ("path", "name")}
    return {"custom_reward_function.terms": found}


def _weighted(rewards: Rewards) -> Iterator[tuple[Any, float]]:
    if isinstance(rewards, Mapping):
        yield from ((function, float(weight)) for function, weight in rewards.items())
    elif isinstance(rewards, list | tuple):
        for each in rewards:
            yield (each[0], float(each[1])) if isinstance(each, tuple) else (each, 1.0)
    elif rewards is not None:
        yield rewards, 1.0


def _reward_entry(function: Any, weight: float, inputs: Path) -> dict[str, Any]:
    if isinstance(function, str) and ":" in function:
        path, _, name = function.rpartition(":")
    elif callable(function):
        written, name = write_function(function, inputs)
        path = str(written)
    else:
        raise ConfigError(
            "this is not a reward function",
            field="rewards",
            got=repr(function),
            expected="a function, a string file.py:function, or (function, weight)",
        )
    return {"name": name, "path": path, "weight": weight}
