"""Which keys of a run's config name code, and whether that may run because the run's folder is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.trusted import TRUST, is_own

_REFERENCE = re.compile(r".*\.(py|pkl)(:\w+)?|[A-Za-z_][\w.]*:[A-Za-z_]\w*|.*\$\{.*", re.DOTALL)
"""A file with code, a name in a file or a module, or a text that is yet to be put together."""
_ALWAYS = ("trust_remote_code", "class_path", "ray_init")
"""The ends of keys that have code run whatever their value is, unless it is empty."""
_MODULES = ("custom_reward_function.path", "custom_reward_function.terms", "custom_cls.path")
"""Keys that name a module without a colon."""


def named_code(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of a nested config by which code runs that is not this program's own."""
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
    """Whether a config is the one that a run left in its folder."""
    beside = ("events.jsonl", "metrics.jsonl", "checkpoints")
    return file.name == "config.yaml" and any((file.parent / name).exists() for name in beside)


def require_own(file: Path, tree: Mapping[str, Any]) -> None:
    """Refuse to run code that the config in a run folder names, unless this user's run wrote that config.

    Args:
        file: the config of the run folder.
        tree: what of it is used.

    Raises:
        ConfigError: names the keys.
    """
    named = list(named_code(tree))
    if named and not is_own(file, file.read_bytes()):
        raise ConfigError(
            "the run's config names code to run, and no run of yours wrote this config",
            field=str(file),
            got=", ".join(named),
            expected="a config that a run of this user wrote, or one that names no code",
            remedy=f"look at these keys; if you know who wrote them, allow it: {TRUST}={file.parent}",
        )
