"""The config in a run folder, read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tandem.errors import DataError
from tandem.observability.inside import opened
from tandem.texts import parse_yaml

_LARGEST = 4 << 20


def read_config(path: Path) -> dict[str, Any]:
    """A run's config as nested plain values.

    Raises:
        FileNotFoundError: there is none.
        DataError: the file is no config.
    """
    with opened(path, path.parent) as file:
        text = file.read(_LARGEST + 1)
    if len(text) > _LARGEST:
        raise DataError("is too large", field=str(path), expected=f"{_LARGEST} bytes at most")
    try:
        return dict(parse_yaml(text))
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise DataError("is no config", field=str(path), got=str(error)[:200]) from error


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of a nested config and their values, in its order."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
