"""Adapters as the folders of the library peft hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.config.model import BackboneConfig
from tandem.errors import ConfigError
from tandem.models.tensor_group import take
from tandem.texts import parse_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""The beginning of the names of the weights in it."""
_FIELD = "model.lora_adapter_path"
# What says nothing of the function that an adapter computes, or is seen in the shapes of its weights, or is
# compared on its own.
_FREE = {
    *("peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "init_lora_weights", "megatron_core", "qalora_group_size"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "runtime_config"),
    *("rank_pattern", "alpha_pattern", "ensure_weight_tying"),
}
_BESIDE_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""First values under which the model's own weights stay as they are."""


def check_adapter_folder(model: BackboneConfig, needed: Mapping[str, Sequence[int]]) -> None:
    """Refuses a folder `model.lora_adapter_path` that does not hold the adapters of the model, and only them:
    whatever else peft would apply is named.

    Args:
        needed: their shapes by name, as `plain_name` gives it.

    Raises:
        ConfigError: no such folder, or adapters of another rank, scale, kind or of other layers.
    """
    folder = Path(str(model.lora_adapter_path))
    try:
        config: dict[str, Any] = parse_json((folder / CONFIG).read_text(encoding="utf-8"))
        with safe_open(folder / WEIGHTS, framework="pt") as stored:
            names = {name.removeprefix(PREFIX): name for name in stored.keys()}  # noqa: SIM118
            shapes = {name: tuple(stored.get_slice(full).get_shape()) for name, full in names.items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise _refused(
            "the folder holds no adapter", f"{folder}: {error}", f"{CONFIG} and {WEIGHTS}"
        ) from error
    for key, value, asked in _differences(config, model):
        raise _refused(
            "the folder holds another kind of adapter", f"{folder}: {key}={value}", f"{key}={asked}"
        )
    others = [name for name in names if ".lora_" not in name]
    if others:
        raise _refused(
            "the folder holds weights beside its adapters, which would be lost",
            f"{folder}: {min(others)}",
            "weights of adapters alone",
        )
    want = {name: tuple(shape) for name, shape in needed.items()}
    if shapes != want:
        first = min(name for name in shapes.keys() | want.keys() if shapes.get(name) != want.get(name))
        raise _refused(
            "the folder holds adapters of other layers",
            f"{folder}: {first} {shapes.get(first, 'is missing')}",
            f"{first} {want.get(first, 'without an adapter: see target_modules')}",
        )


def _differences(config: dict[str, Any], model: BackboneConfig) -> Iterator[tuple[str, Any, Any]]:
    """Keys by which peft would compute something else than W + s B A, with one s for all layers; their
    values; what they must be."""
    plain: dict[str, Any] = import_module("peft").LoraConfig().to_dict()
    asked = plain | {"r": model.lora_rank, "lora_alpha": model.lora_alpha}
    given = plain | config
    if str(given["peft_type"]).rpartition(".")[2] != "LORA":
        yield "peft_type", given["peft_type"], "LORA"
    if given["init_lora_weights"] not in _BESIDE_THE_BASE:
        yield "init_lora_weights", given["init_lora_weights"], "true: it changes the model's own weights too"
    for pattern, key in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        if any(value != asked[key] for value in (given[pattern] or {}).values()):
            yield pattern, given[pattern], f"{{}}: the same {key} for every layer"
    for key in sorted(given.keys() - _FREE):
        if (given[key] or asked.get(key)) and given[key] != asked.get(key):
            yield key, given[key], asked.get(key)


@torch.no_grad()
def read_adapters(named: Mapping[str, Tensor], folder: str | Path) -> None:
    """Fills adapters, sharded or not, from a folder that `check_adapter_folder` has accepted.

    Args:
        named: by name, as `plain_name` gives it.
    """
    with safe_open(Path(folder) / WEIGHTS, framework="pt") as stored:
        for name, parameter in named.items():
            take(parameter, stored.get_slice(PREFIX + name))


def _refused(problem: str, got: str, expected: str) -> ConfigError:
    remedy = (
        "set lora_rank, lora_alpha and target_modules as the adapter has them; what is more than adapters of "
        "one rank and scale, merge into the model with peft's merge_and_unload, or leave this key out"
    )
    return ConfigError(problem, field=_FIELD, got=got, expected=expected, remedy=remedy)
