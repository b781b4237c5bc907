"""Export adapters: merged into the base model's weights, or separately in peft's format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.checkpoint.staging import staged
from tandem.checkpoint.weights import read_weights as trained_weights
from tandem.config.changed_models import origin_of
from tandem.config.model import ModelConfig
from tandem.engines.train.lora import BASE, BASE_TYPE, SCALING
from tandem.engines.weight_sync import checksum
from tandem.errors import CheckpointError
from tandem.models.loading import load_policy, load_scorer
from tandem.models.lora import (
    adapted_layers,
    add_adapters,
    is_adapter,
    lora_config,
    merged,
    plain_name,
    require_peft,
    weight_name,
)
from tandem.models.lora_files import PREFIX, WEIGHTS
from tandem.models.tensor_group import place
from tandem.models.weight_files import read_weights, stored_tensors
from tandem.offline.export_files import copy_tokenizer

_A, _B = ".lora_A.weight", ".lora_B.weight"


def merged_weights(path: Path, model: ModelConfig, *, scores: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of an equivalent model without adapters, one after the other.

    The weights have the dtype in which the adapters were trained. All adapters and one weight of the model
    are in memory at a time.

    Args:
        path: the folder that an engine saved.
        model: the model section of the run's config.
        scores: whether it is a reward model.

    Raises:
        CheckpointError: If the model's folder no longer has the weights with which the adapters were trained.
        ConfigError: If peft is not installed.
    """
    layers = _layers(model, scores=scores)
    trained = dict(trained_weights(path))
    adapters = {name: trained.pop(name) for name in list(trained) if is_adapter(name)}
    digests = dict(trained_weights(path, f"{BASE}."))
    scaling = float(dict(trained_weights(path, SCALING))[""])
    yield from trained.items()
    for name, weight in _base_weights(model, scores=scores, without=trained):
        if int(checksum(weight.to(BASE_TYPE))) != int(digests.get(name, 0)):
            raise CheckpointError(
                "the model's folder does not have the weights with which the adapters were trained",
                field=name,
                got=model.path,
                expected="the folder as it was when the run started",
                remedy="restore the folder, or export only the adapters with --adapter",
            )
        if name in layers:
            stem, layer = layers[name]
            a, b = adapters[stem + _A], adapters[stem + _B]
            weight = merged(layer, weight.to(a.dtype), a, b, scaling, place(weight))
        yield name, weight


def export_adapter(
    path: Path,
    model: ModelConfig,
    out: Path,
    dtype: torch.dtype,
    *,
    scores: bool,
    say: Callable[[str], None],
) -> Path:
    """Write a folder that `peft.PeftModel.from_pretrained` loads on top of the base model.

    The folder has the adapters, a reward model's head, and the tokenizer.

    Args:
        path: the folder that an engine saved.
        model: the model section of the run's config.
        out: the folder to write; it must not exist or be empty.
        dtype: the type of the written tensors.
        scores: whether the model is a reward model.
        say: prints a sentence to the user.

    Returns:
        The folder.

    Raises:
        CheckpointError: If the run trained all weights.
        ConfigError: If peft is not installed.
    """
    if not model.lora_rank:
        raise CheckpointError(
            "the run trained all weights and has no adapters", got=path, remedy="leave out --adapter"
        )
    require_peft(model)
    origin, source = origin_of(model.path), model.path
    if origin is not None:
        source = origin.source
        say(
            f"the adapters were trained on {source} with these changes: override_config={origin.override}, "
            f"resize_embeddings={origin.rows}. Change the model in the same way before you load them."
        )
    tensors = {name: value.to(dtype) for name, value in trained_weights(path)}
    adapted = {name.removesuffix(_A) for name in tensors if name.endswith(_A)}
    config = lora_config(
        model,
        "score" if scores else "policy",
        target_modules=_targets(_model(model, scores=scores, weights=False), adapted),
        exclude_modules=None,
        modules_to_save=sorted({name.rpartition(".")[0] for name in tensors if not is_adapter(name)}) or None,
        base_model_name_or_path=str(Path(source).absolute()),
        inference_mode=True,
    )
    with staged(out) as folder:
        config.save_pretrained(folder)
        copy_tokenizer(model, folder)
        named = {PREFIX + name: value.contiguous() for name, value in tensors.items()}
        save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    return out


def _layers(model: ModelConfig, *, scores: bool) -> dict[str, tuple[str, Any]]:
    """Return a dict from the name of each adapted weight to the name of peft's layer and the layer."""
    require_peft(model)
    skeleton, new = _model(model, scores=scores, weights=False), {"lora_adapter_path": None}
    kind = "score" if scores else "policy"
    add_adapters(skeleton, model.model_copy(update=new), kind, torch.float32)
    layers = adapted_layers(skeleton).items()
    return {plain_name(f"{name}.base_layer.{weight_name(layer)}"): (name, layer) for name, layer in layers}


def _targets(skeleton: PreTrainedModel, stems: set[str]) -> list[str]:
    """Return the last components of the adapted linear layers' names, or the full names if ambiguous."""
    modules = dict(skeleton.named_modules())
    adapted = {name for name in stems if isinstance(modules.get(name), nn.Linear)}
    ends = {name.rpartition(".")[2] for name in adapted}
    alike = {name for name in modules if name.rpartition(".")[2] in ends}
    return sorted(ends if alike == adapted else adapted)


def _model(model: ModelConfig, *, scores: bool, weights: bool) -> PreTrainedModel:
    remote = model.trust_remote_code
    if scores:
        return load_scorer(model.path, trust_remote_code=remote, new_head=True, weights=weights)
    return load_policy(model.path, trust_remote_code=remote, weights=weights)


def _base_weights(
    model: ModelConfig, *, scores: bool, without: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the folder's parameters and persistent buffers, except those in `without`."""
    skeleton = _model(model, scores=scores, weights=False)
    needed = {name: value for name, value in stored_tensors(skeleton).items() if name not in without}
    load = partial(_model, model, scores=scores, weights=True)
    yield from read_weights(model.path, skeleton, needed, load)
