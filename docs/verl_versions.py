"""Write docs/verl_versions.json: keys of verl's trainers that are not in `ppo_trainer` of 0.9.1.

    pip download --no-deps -d WHEELS verl==0.6.0    # and 0.6.1 0.7.0 0.7.1 0.8.0 0.9.0 0.9.1
    python -m docs.verl_versions WHEELS

For each key the file has the versions whose `ppo_trainer` or `ppo_megatron_trainer` contains it, and its
default in the last of these versions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import yaml

from docs.verl_keys import OTHERS, VERL

TRAINERS = ("ppo_trainer", "ppo_megatron_trainer")


def flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return the values by dotted path, without `_target_`."""
    rows: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{before}{name}"
        if isinstance(value, Mapping) and value:
            rows |= flat(value, f"{path}.")
        elif name != "_target_":
            rows[path] = value
    return rows


def keys_of(wheel: Path) -> dict[str, Any]:
    """Return the keys and defaults of both trainers, from the reference files in verl's wheel."""
    with ZipFile(wheel) as files:
        names = [f"verl/trainer/config/_generated_{name}.yaml" for name in TRAINERS]
        return {key: value for name in names for key, value in flat(yaml.safe_load(files.read(name))).items()}


def write(wheels: Path) -> None:
    found: dict[str, dict[str, Any]] = {}
    for wheel in sorted(wheels.glob("verl-*.whl")):
        for name, default in keys_of(wheel).items():
            if name not in VERL:
                row = found.setdefault(name, {"versions": []})
                row["versions"].append(wheel.name.split("-")[1])
                row["default"] = default
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(found.items()))
    OTHERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
