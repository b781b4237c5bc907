"""Try every causal language model of transformers, and write tandem/models/families.json.

    python -m docs.families [MODEL_TYPE ...]

Each architecture is built small, with random weights in float64. Training must compute what transformers'
own model computes for each sequence alone, for sequences of 1 to 300 tokens, with windows of 8 and 40 tokens.
With names, only these architectures are tried, and the other entries stay as they are.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from tandem.config.model import BackboneConfig
from tandem.errors import TandemError
from tandem.models import small_copy
from tandem.models.architectures import may_pack
from tandem.models.double_precision import double_precision
from tandem.models.families import FILE, Family, families
from tandem.models.loading import load_config
from tandem.models.lora import add_adapters, is_adapter
from tandem.models.packed_check import check_packed, packing_error
from tandem.models.tensor_parallel import check_tensor_parallel
from tandem.trainer.trial import LIMIT, native_difference

# Fields that the default config of transformers leaves open, or that make the model causal.
NEEDED: dict[str, dict[str, Any]] = {
    **{kind: {"head_dim": 128} for kind in ("glm4_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "nemotron": {"num_key_value_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 8},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
}
_LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64},
    **{"short_factor": [1.0] * 48, "long_factor": [3.0] * 48},
}
_STRETCHED = {"factor": 4.0, "rope_theta": 10000.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama (dynamic)": ("llama", {"rope_parameters": {"rope_type": "dynamic"} | _STRETCHED}),
    "llama (yarn)": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64} | _STRETCHED},
    ),
    "mistral (window)": ("mistral", {"sliding_window": 64}),
    "phi3 (longrope)": ("phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64}),
    "qwen2 (window)": ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}),
    "qwen2_moe (window)": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 64}),
}
LENGTHS = (300, 1, 41, 2, 150)
QUICK = (
    *("cohere2", "gemma2", "gemma3_text", "gemma4_text", "glm4", "gpt2", "gpt_oss", "llama4_text"),
    *("mistral (window)", "olmo3", "phi3 (longrope)", "qwen3"),
)
"""Twelve architectures that differ in how they compute attention and logits."""


def names() -> list[str]:
    """Return the names of all architectures and variants, in alphabetical order."""
    known = [kind for kind, config in CONFIG_MAPPING.items() if config in MODEL_FOR_CAUSAL_LM_MAPPING]
    return sorted({*known, *VARIANTS})


def tried(name: str, *, long: bool = True) -> Family:
    """Try one architecture.

    Args:
        name: a name from `names`.
        long: whether to try also sequences of 300 tokens and windows of 40.
    """
    kind, changes = VARIANTS.get(name, (name, NEEDED.get(name, {})))
    failed: dict[str, Any] = {"error": math.nan, "native": False, "lora": False, "tensor_parallel": False}
    try:
        config = CONFIG_MAPPING[kind](**changes)
        if getattr(config, "is_decoder", None) is False:
            config = CONFIG_MAPPING[kind](**changes, is_decoder=True)
        model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        text = config.get_text_config()
    except Exception as error:  # a config's class may raise any exception
        return Family(name, "", **failed, experts=False, reason=_first_line(error))
    model = model[0] if isinstance(model, tuple) else model
    config.architectures = [model.__name__]
    counts = (value for field, value in vars(text).items() if field.endswith("_experts"))
    experts = any(isinstance(value, int) and value > 1 for value in counts)
    try:
        with TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            found, own = check_packed(folder)
            worst = [found.alone, found.beyond]
            if long and found.sound:
                worst.append(_longer(folder))
    except Exception as error:  # a model's class may raise any exception
        return Family(name, "", **failed, experts=experts, reason=_first_line(error))
    exact = found.sound and not math.isnan(sum(worst)) and max(worst) <= LIMIT
    native, reason = _native(own) if exact else (False, found.failure or "; ".join(found.lines[1:]))
    layout = ("packed" if may_pack(model, config) else "rows") if exact else ""
    able = {"native": native, "lora": exact and _lora(own), "tensor_parallel": exact and _splits(config)}
    return Family(name, layout, max(worst), **able, experts=experts, reason=reason)


def _longer(folder: str) -> float:
    """Return the largest error of sequences of up to 300 tokens, with windows of 40."""
    with patch.multiple(small_copy, _WINDOW=40, _POSITIONS=512, _STRETCHED=64):
        text = load_config(folder).get_text_config()
        most = getattr(text, "max_position_embeddings", None) or LENGTHS[0]
        return packing_error(folder, [min(length, most) for length in LENGTHS])


def _native(own: Any) -> tuple[bool, str]:
    """Return whether the native engine is exact, and the reason if it is not."""
    try:
        difference = native_difference(own, beyond=True)
    except TandemError as error:
        return False, _first_line(error)
    return difference <= LIMIT, "" if difference <= LIMIT else f"native log-probs differ by {difference:.2g}"


def _lora(own: Any) -> bool:
    """Return whether adapters on all linear layers get a gradient."""
    try:
        with double_precision():
            add_adapters(own, BackboneConfig(path="-", lora_rank=2), "policy", torch.float64)
            own.train()
            own(input_ids=torch.arange(9)[None], use_cache=False).logits.square().mean().backward()
    except Exception:  # a model's class may raise any exception
        return False
    learning = [p.grad for name, p in own.named_parameters() if is_adapter(name) and "lora_B" in name]
    return any(grad is not None and bool(grad.abs().max() > 0) for grad in learning)


def _splits(config: Any) -> bool:
    try:
        check_tensor_parallel(small_copy.small_copy(config), 2)
    except TandemError:
        return False
    return True


def _first_line(error: Exception) -> str:
    """Return the error's message without the folder that it was tried in."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    told = next((line.partition("got:")[2].strip() for line in lines if "got:" in line), "")
    text = f"{lines[0].removeprefix('model.path: ')}: {told}" if told else lines[0]
    return " ".join(word for word in text.split() if not word.startswith("/tmp"))[:300]


def _entries(only: list[str]) -> Iterator[Family]:
    held = {family.name: family for family in families()} if only else {}
    for name in names():
        if not only or name in only:
            family = tried(name)
            print(f"{name}: {family.layout or 'no'} {family.reason}", file=sys.stderr, flush=True)
            yield family
        elif name in held:
            yield held[name]


def main(only: list[str], file: Path = FILE) -> None:
    """Try the architectures and write the file."""
    transformers.logging.set_verbosity(50)
    torch.set_num_threads(1)
    found = [asdict(family) for family in _entries(only)]
    for entry in found:
        known = entry["error"] is not None and not math.isnan(entry["error"])  # None in the file's entries
        entry["error"] = float(f"{entry['error']:.1e}") if known else None
    whole = {"transformers": transformers.__version__, "families": found}
    file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
