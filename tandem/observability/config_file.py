"""Read the config in a run folder."""

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
    """Return a run's config as nested dicts and lists.

    Raises:
        FileNotFoundError: If the file does not exist.
        DataError: If the file is not a config.
    """
    with opened(path, path.parent) as file:
        text = file.read(_LARGEST + 1)
    if len(text) > _LARGEST:
        raise DataError("the file is too large", field=str(path), expected=f"at most {_LARGEST} bytes")
    try:
        return dict(parse_yaml(text))
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise DataError("the file is not a config", field=str(path), got=str(error)[:200]) from error


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for all keys of a nested config, in order."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
