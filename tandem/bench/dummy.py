"""Write random weights for a model folder that has a config.json, tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tandem.demo.model import build_tokenizer
from tandem.models.loading import load_config
from tandem.models.weight_files import INDEX

SHARD_BYTES = 2 << 30
_STD = 0.02
_TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model")


def write_dummy(folder: Path, *, scorer: bool = False) -> None:
    """Write random bf16 weights to a folder, and a tokenizer if the folder has no tokenizer.

    At most one shard is in memory at a time. The tokenizer has one token per byte.

    Args:
        folder: folder with a config.json.
        scorer: whether the model is a reward model, which has one label.

    Raises:
        ModelError: transformers does not know the model type in the config.json.
    """
    config = load_config(folder)
    if scorer:
        config.num_labels = 1
    kind: Any = AutoModelForSequenceClassification if scorer else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        build_tokenizer().save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():  # a tied head occurs once
        drawn = torch.empty(parameter.shape, dtype=torch.bfloat16)
        if shard and sum(each.nbytes for each in shard.values()) + drawn.nbytes > SHARD_BYTES:
            _write(shard, places, folder)
        shard[name] = (
            drawn.normal_(0, _STD, generator=generator) if drawn.ndim > 1 else drawn.fill_("norm" in name)
        )
    _write(shard, places, folder)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")


def _write(shard: dict[str, torch.Tensor], places: dict[str, str], folder: Path) -> None:
    name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
    save_file(shard, folder / name, metadata={"format": "pt"})
    places |= dict.fromkeys(shard, name)
    shard.clear()
