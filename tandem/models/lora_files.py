"""Adapters as the folders of the library peft hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.config.model import BackboneConfig
from tandem.errors import ConfigError
from tandem.models.tensor_group import local, place
from tandem.texts import parse_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""The beginning of the names of the weights in it."""
_FIELD = "model.lora_adapter_path"
# What makes adapters something else than W + s B A, by the value that leaves it out.
_VARIANTS = {
    "use_rslora": False,
    "use_dora": False,
    "bias": "none",
    "fan_in_fan_out": False,
    "lora_bias": False,
}


def check_adapter_folder(model: BackboneConfig, needed: Mapping[str, Sequence[int]]) -> None:
    """Refuses a folder `model.lora_adapter_path` that does not hold the adapters of the model, and only them.

    Args:
        needed: their shapes by name, as `plain_name` gives it.

    Raises:
        ConfigError: no such folder, or adapters of another rank, scale, kind or of other layers.
    """
    folder = Path(str(model.lora_adapter_path))
    try:
        config: dict[str, Any] = parse_json((folder / CONFIG).read_text(encoding="utf-8"))
        with safe_open(folder / WEIGHTS, framework="pt") as stored:
            names = {name.removeprefix(PREFIX): name for name in stored.keys() if ".lora_" in name}  # noqa: SIM118
            shapes = {name: tuple(stored.get_slice(full).get_shape()) for name, full in names.items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise _refused(
            "the folder holds no adapter", f"{folder}: {error}", f"{CONFIG} and {WEIGHTS}"
        ) from error
    asked = {"r": model.lora_rank, "lora_alpha": model.lora_alpha, **_VARIANTS}
    other = {key: config[key] for key, value in asked.items() if config.get(key, value) != value}
    if other:
        key, value = next(iter(other.items()))
        raise _refused(
            "the folder holds another kind of adapter", f"{folder}: {key}={value}", f"{key}={asked[key]}"
        )
    want = {name: tuple(shape) for name, shape in needed.items()}
    if shapes != want:
        first = min(name for name in shapes.keys() | want.keys() if shapes.get(name) != want.get(name))
        raise _refused(
            "the folder holds adapters of other layers",
            f"{folder}: {first} {shapes.get(first, 'is missing')}",
            f"{first} {want.get(first, 'without an adapter: see target_modules')}",
        )


@torch.no_grad()
def read_adapters(named: Mapping[str, Tensor], folder: str | Path) -> None:
    """Fills adapters, sharded or not, from a folder that `check_adapter_folder` has accepted.

    Args:
        named: by name, as `plain_name` gives it.
    """
    with safe_open(Path(folder) / WEIGHTS, framework="pt") as stored:
        for name, parameter in named.items():
            part = local(parameter)
            if part.numel():
                part.copy_(stored.get_slice(PREFIX + name)[place(parameter)])


def _refused(problem: str, got: str, expected: str) -> ConfigError:
    remedy = "set lora_rank, lora_alpha and target_modules as the adapter has them, or leave this key out"
    return ConfigError(problem, field=_FIELD, got=got, expected=expected, remedy=remedy)
