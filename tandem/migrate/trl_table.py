"""TRL's settings (version 1.16), with their rules from `trl.yaml`."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from tandem.peers.table import Rule, by_name, read_table
from tandem.texts import parse_json

FIELDS: dict[str, dict[str, Any]] = parse_json(files("tandem.peers").joinpath("trl_1_16.json").read_bytes())
"""A dict from class to its fields, with their defaults."""

_ROWS = read_table("trl.yaml")
OLDER_NAMES: dict[str, str] = _ROWS.pop("names")
"""A dict from a setting's name in earlier versions to its name in TRL 1.16."""
_PARTS = {name: by_name(rows) for name, rows in _ROWS.items()}
OLDER = _PARTS["older"]
"""Settings of earlier versions, for trainers that train on prompts."""
MODEL, SCRIPT = _PARTS["model"], _PARTS["script"]
TABLES: dict[str, dict[str, Rule]] = {
    f"{own}Config": {**_PARTS["training"], **_PARTS[common], **_PARTS[own]}
    for own, common in {"GRPO": "online", "RLOO": "online", "SFT": "offline", "Reward": "offline"}.items()
}
"""A dict from a config class of TRL's trainers to its rules."""
