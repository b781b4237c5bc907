"""Qwen2.5 models with random weights, and formulas for their operations and memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tandem.demo.model import build_tokenizer
from tandem.memory.activations import FASTEST_FIRST, Setup
from tandem.memory.gathered import Gathered
from tandem.memory.shapes import model_shape
from tandem.memory.training import Way, update_moments, worst

_QWEN = {"vocab_size": 151936, "tie_word_embeddings": True}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "tie_word_embeddings": True,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "0.5B": _QWEN
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5B": _QWEN
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "7B": {
        "vocab_size": 152064,
        "tie_word_embeddings": False,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
}
MOST_POSITIONS = 32768


def build(size: str, dtype: torch.dtype, device: torch.device, **overrides: Any) -> PreTrainedModel:
    """Return a model with random weights, drawn on the device."""
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES[size] | overrides, max_position_embeddings=MOST_POSITIONS, use_cache=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: Any = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    finally:
        torch.set_default_dtype(before)
    return model.to(dtype).eval()  # type: ignore[no-any-return]


def model_folder(size: str, parent: Path, device: torch.device) -> Path:
    """Return a Hugging Face folder with the model of `build` in bf16; it is written once.

    The tokenizer has one token per byte and needs no network.
    """
    folder = parent / f"qwen_{size}"
    if not (folder / "tokenizer_config.json").exists():
        build(size, torch.bfloat16, device).save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
    return folder


def matrices(size: str) -> int:
    """Return the number of weights in the matrices of the layers and the head.

    Each weight is read and used once for each token.
    """
    shape = SIZES[size]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kept = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    layer = 2 * hidden * (hidden + kept) + 3 * hidden * inner
    return int(layer * shape["num_hidden_layers"] + hidden * shape["vocab_size"])


def parameters(size: str) -> int:
    """Return the number of all weights: matrices, embedding, norms and biases."""
    shape = SIZES[size]
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    kept = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    embedding = 0 if shape["tie_word_embeddings"] else hidden * shape["vocab_size"]
    return int(matrices(size) + embedding + layers * (3 * hidden + 2 * kept) + hidden)


def kv_bytes(size: str, item: int = 2) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    shape = SIZES[size]
    kept = shape["hidden_size"] * shape["num_key_value_heads"] // shape["num_attention_heads"]
    return int(2 * kept * shape["num_hidden_layers"] * item)


def forward_operations(size: str, length: int) -> float:
    """Return the operations per token of a forward pass over sequences of this length.

    Attention is included: a token attends to half of its sequence on average. A multiplication and an
    addition count as two operations. Recomputation is not included. A backward pass takes twice as many
    operations.
    """
    shape = SIZES[size]
    return 2 * matrices(size) + 2 * length * shape["hidden_size"] * shape["num_hidden_layers"]


def decode_seconds(size: str, batch: int, context: float, copy: float, product: float) -> float:
    """Return the least seconds of a decode step.

    This is the longer of two times: reading each matrix and each sequence's keys and values once, and
    computing with them.
    """
    shape = SIZES[size]
    read = 2 * matrices(size) + batch * context * kv_bytes(size)
    attended = 4 * context * shape["hidden_size"] * shape["num_hidden_layers"]
    return max(read / copy, batch * (2 * matrices(size) + attended) / product)


def training_bytes(size: str, tokens: int, *, fused: bool) -> dict[str, int]:
    """Return the bytes of training with AdamW on one device, by Tandem's formulas.

    "state" is the fp32 weights and their two moments. The other entries, one for each recomputation mode, add
    what an update of several micro-batches needs.

    Args:
        size: the model.
        tokens: tokens per micro-batch.
        fused: whether norms and gated layers are fused kernels.
    """
    shape, state = model_shape({"model_type": "qwen2", **SIZES[size]}), 12 * parameters(size)
    way = Way(Setup(itemsize=2, fused=fused), master=4, shards=1, head="triton", micro_batches=3)
    kept = {
        mode: worst(update_moments(Gathered.of(shape), shape.decoder, replace(way, mode=mode), tokens))
        for mode in FASTEST_FIRST
    }
    return {"state": state, **{mode: round(state + most.total) for mode, most in kept.items()}}
