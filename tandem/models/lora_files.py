"""Functions that check and read adapter folders in the format of the library peft."""

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
"""The prefix of all weight names in an adapter file."""
_FIELD = "model.lora_adapter_path"
# Config keys that need no comparison. They do not change what an adapter computes, or they follow from the
# shapes of the weights, or another check compares them.
_FREE = {
    *("peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "init_lora_weights", "megatron_core", "qalora_group_size"),
    *("target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern"),
    *("runtime_config", "rank_pattern", "alpha_pattern", "ensure_weight_tying"),
}
_BESIDE_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""The values of `init_lora_weights` that do not change the model's base weights."""


def check_adapter_folder(model: BackboneConfig, needed: Mapping[str, Sequence[int]]) -> None:
    """Check that the folder `model.lora_adapter_path` contains exactly the adapters of the model.

    If the folder contains anything else that peft would apply, the error names it.

    Args:
        model: the config section of the model.
        needed: a dict from adapter name (see `lora.plain_name`) to shape.

    Raises:
        ConfigError: If the folder does not exist, or its adapters have another rank, scale or type, or belong
            to other layers.
    """
    folder = Path(str(model.lora_adapter_path))
    try:
        config: dict[str, Any] = parse_json((folder / CONFIG).read_text(encoding="utf-8"))
        with safe_open(folder / WEIGHTS, framework="pt") as stored:
            names = {name.removeprefix(PREFIX): name for name in stored.keys()}  # noqa: SIM118
            shapes = {name: tuple(stored.get_slice(full).get_shape()) for name, full in names.items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise _refused(
            "the folder contains no adapter", f"{folder}: {error}", f"{CONFIG} and {WEIGHTS}"
        ) from error
    for key, value, asked in _differences(config, model):
        raise _refused(
            "the folder contains another kind of adapter", f"{folder}: {key}={value}", f"{key}={asked}"
        )
    others = [name for name in names if ".lora_" not in name]
    if others:
        raise _refused(
            "the folder contains weights besides its adapters, and these would be lost",
            f"{folder}: {min(others)}",
            "only the weights of adapters",
        )
    want = {name: tuple(shape) for name, shape in needed.items()}
    if shapes != want:
        first = min(name for name in shapes.keys() | want.keys() if shapes.get(name) != want.get(name))
        raise _refused(
            "the folder contains adapters of other layers",
            f"{folder}: {first} {shapes.get(first, 'is missing')}",
            f"{first} {want.get(first, 'without an adapter; see target_modules and target_parameters')}",
        )


def _differences(config: dict[str, Any], model: BackboneConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield the config keys because of which peft would not compute W + s B A with the same s everywhere.

    Yields:
        Triples of key, value in the folder, and required value.
    """
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
    """Load adapters, sharded or not, from a folder that `check_adapter_folder` accepted.

    Args:
        named: a dict from adapter name (see `lora.plain_name`) to the parameter to fill.
        folder: the adapter folder.
    """
    with safe_open(Path(folder) / WEIGHTS, framework="pt") as stored:
        for name, parameter in named.items():
            take(parameter, stored.get_slice(PREFIX + name))


def _refused(problem: str, got: str, expected: str) -> ConfigError:
    remedy = (
        "set lora_rank, lora_alpha, target_modules and target_parameters to the adapter's values. If the "
        "adapter has several ranks, scales or other extras, merge it into the model with peft's "
        "merge_and_unload, or leave this key out"
    )
    return ConfigError(problem, field=_FIELD, got=got, expected=expected, remedy=remedy)
