"""Small models of architectures with windows, chunks, sinks, experts, recurrences and stretched angles."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tandem.models.weight_files import persistent_buffers
from tests.support.tiny import make_model

WINDOW = 8
"""The tokens of a window or a chunk."""
_WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": _WINDOWS | _EXPERTS,
    "gemma3_text": _WINDOWS,
    "olmo3": _WINDOWS,
    "phi3": {"original_max_position_embeddings": 3, "sliding_window": None},  # the limit of longrope
    "llama4_text": {
        **_EXPERTS,
        **{"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"]},
        **{"intermediate_size_mlp": 48, "moe_layers": [0], "no_rope_layers": [1, 0]},
    },
    "glm4_moe": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1},
        **{"moe_intermediate_size": 32, "first_k_dense_replace": 1, "topk_group": 1},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3_next": {
        **{"layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8},
        **{"linear_value_head_dim": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    },
}
_ROUTED = FAMILIES["glm4_moe"]
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": _EXPERTS,
    "minimax_m2": _EXPERTS | {"rotary_dim": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "ernie4_5_moe": {
        **{"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 32},
        **{"moe_layer_start_index": 1, "moe_layer_end_index": 1},
    },
    "dots1": _ROUTED,
    "deepseek_v3": _ROUTED
    | {
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4, "topk_method": "noaux_tc"},
        **{"scoring_func": "sigmoid"},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    },
}
"""Further architectures whose experts are one tensor in transformers and separate tensors in folders."""


def make_family(folder: Path, family: str, *, head_dim: int = 8, **changes: Any) -> Path:
    """Create a random model of an architecture of FAMILIES or MIXTURES, with its tokenizer."""
    keys = (FAMILIES | MIXTURES)[family] | {"head_dim": head_dim, "hidden_size": 4 * head_dim} | changes
    if family == "phi3":
        rope = {"short_factor": [1.0] * (head_dim // 2), "long_factor": [3.0] * (head_dim // 2)}
        limit = "original_max_position_embeddings"
        keys = {"rope_parameters": _LONG | rope | {limit: keys[limit]}, **keys}
    path = make_model(folder, kind=family, **keys)
    model = AutoModelForCausalLM.from_pretrained(path)
    for constant in persistent_buffers(model).values():
        constant.add_(0.3 * torch.randn_like(constant))
    model.save_pretrained(path)
    return path
