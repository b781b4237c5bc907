"""Defaults that are others in verl."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from tandem.config.root import TrainConfig
from tandem.config.schema import keys, shown

_FOUND = yaml.safe_load(Path(__file__).with_name("defaults.yaml").read_text(encoding="utf-8"))

DEFAULTS: Mapping[str, Any] = _FOUND["taken"]
"""Key → verl's default, of those that `trainer.defaults=verl` takes."""

KEPT: Mapping[str, tuple[Any, str]] = {name: (value, why) for name, (value, why) in _FOUND["kept"].items()}
"""Key → verl's default, and why ours stays. Where files lie depends on none, what is learnt on
`loss_agg_mode` alone, with gspo, and a notice says so."""


def differing(given: Collection[str]) -> str:
    """A sentence that lists the defaults that count, are others in verl, and were not given."""
    ours = keys(TrainConfig)
    rows = [
        f"{name}={ours[name].inherits or shown(ours[name].default)} (verl: {shown(value)})"
        for name, value in DEFAULTS.items()
        if name not in given
    ]
    return f"Other defaults than verl's, which trainer.defaults=verl takes: {'; '.join(rows)}."
