"""TRL's settings (1.16), and what each is called here according to `trl.yaml`."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from tandem.peers.table import Rule, by_name, read_table
from tandem.texts import parse_json

FIELDS: dict[str, dict[str, Any]] = parse_json(files("tandem.peers").joinpath("trl_1_16.json").read_bytes())
"""The fields of each class, with their defaults."""

_ROWS = read_table("trl.yaml")
OLDER_NAMES: dict[str, str] = _ROWS.pop("names")
"""The name in TRL 1.16 of each setting that earlier versions name differently."""
_PARTS = {name: by_name(rows) for name, rows in _ROWS.items()}
OLDER = _PARTS["older"]
"""Settings of earlier versions, for trainers that train on prompts."""
MODEL, SCRIPT = _PARTS["model"], _PARTS["script"]
TABLES: dict[str, dict[str, Rule]] = {
    f"{own}Config": {**_PARTS["training"], **_PARTS[common], **_PARTS[own]}
    for own, common in {"GRPO": "online", "RLOO": "online", "SFT": "offline", "Reward": "offline"}.items()
}
"""The rules of each class of TRL that a trainer takes."""
