"""Find config keys that load the user's code, and check whether a run folder's code may be loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.trusted import TRUST, is_own

_REFERENCE = re.compile(r".*\.(py|pkl)(:\w+)?|[A-Za-z_][\w.]*:[A-Za-z_]\w*|.*\$\{.*", re.DOTALL)
"""Matches a Python file, FILE:NAME, MODULE:NAME, or a text with an interpolation."""
_ALWAYS = ("trust_remote_code", "class_path", "ray_init")
"""The last names of keys that cause code to run for any value that is not empty."""
_MODULES = ("custom_reward_function.path", "custom_reward_function.terms", "custom_cls.path")
"""Keys that name a module without a colon."""


def named_code(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the keys of a nested config that cause code from outside of Tandem to run."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if value and (str(name) in _ALWAYS or key.endswith(_MODULES)):
            yield key
        elif isinstance(value, Mapping):
            yield from named_code(value, f"{key}.")
        else:
            values = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(each, str) and _REFERENCE.fullmatch(each) for each in values):
                yield key


def in_run_folder(file: Path) -> bool:
    """Return whether a file is the config that a run wrote to its folder."""
    beside = ("events.jsonl", "metrics.jsonl", "checkpoints")
    return file.name == "config.yaml" and any((file.parent / name).exists() for name in beside)


def require_own(file: Path, tree: Mapping[str, Any]) -> None:
    """Raise an error if a run folder's config loads code and another user's run wrote the config.

    Args:
        file: the config of the run folder.
        tree: the part of the config that is used.

    Raises:
        ConfigError: the config loads code. The error lists the keys.
    """
    named = list(named_code(tree))
    if named and not is_own(file, file.read_bytes()):
        raise ConfigError(
            "this config names code to run, but it was not written by a run of yours",
            field=str(file),
            got=", ".join(named),
            expected="a config that one of your runs wrote, or one that names no code",
            remedy=f"check these keys; if you trust them, set {TRUST}={file.parent}",
        )
