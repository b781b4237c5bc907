"""Tiny models of every layout that can be divided, and adapters for them."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from tests.engines.train import synthetic

SHAPE = {**synthetic.SHAPE, "num_hidden_layers": 2}
UNTIED = {**SHAPE, "tie_word_embeddings": False}
BIASED = {"vocab_size": 32, "pad_token_id": 20, "attention_bias": True, "mlp_bias": True}
# A vocabulary of 31 is not divisible by the ranks. Heads and columns are, by four in the last model.
CONFIGS = {
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**UNTIED, head_dim=16),
    "llama": lambda: LlamaConfig(**UNTIED | BIASED),
    "mistral": lambda: MistralConfig(**{**UNTIED, "num_key_value_heads": 4, "sliding_window": None}),
    "deep": lambda: Qwen2Config(**{**SHAPE, "num_hidden_layers": 5}),
    "gpt_oss": lambda: GptOssConfig(**UNTIED | EXPERTS | WINDOW | NO_IDS, head_dim=8, layer_types=KINDS),
    "gemma2": lambda: Gemma2Config(**SHAPE | CAPS | WINDOW | NO_IDS, head_dim=8, layer_types=KINDS),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE | WINDOW | NO_IDS, head_dim=8, layer_types=KINDS),
    "olmo3": lambda: Olmo3Config(**UNTIED | WINDOW | NO_IDS, layer_types=KINDS),
    "phi3": lambda: Phi3Config(**UNTIED | WINDOW | NO_IDS),
    "llama4": lambda: Llama4TextConfig(**UNTIED | CHUNKS | NO_IDS),
    "windowed": lambda: MistralConfig(**UNTIED | WINDOW),
    "glm4": lambda: Glm4Config(**UNTIED | NO_IDS, head_dim=8),
    "starcoder2": lambda: Starcoder2Config(**SHAPE | WINDOW | NO_IDS),
    "qwen3_moe": lambda: Qwen3MoeConfig(**UNTIED | INNER | NO_IDS, num_experts=8, num_experts_per_tok=3),
    "mixtral": lambda: MixtralConfig(**UNTIED | EXPERTS | NO_IDS | {"num_local_experts": 6}),
    "deepseek_v3": lambda: DeepseekV3Config(**UNTIED | ROUTED | LATENT | NO_IDS, first_k_dense_replace=1),
    "glm4_moe": lambda: Glm4MoeConfig(**UNTIED | ROUTED | NO_IDS, head_dim=8, first_k_dense_replace=1),
}
WINDOW, KINDS = {"sliding_window": 8}, ["sliding_attention", "full_attention"]
NO_IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
INNER = {"moe_intermediate_size": 11}
ROUTED = {
    **{**INNER, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 1},
    **{"n_group": 3, "topk_group": 2},
}
LATENT = {
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    "num_key_value_heads": 4,
}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}
CHUNKS = {
    **EXPERTS,
    **{"attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"], "head_dim": 8},
    **{"intermediate_size_mlp": 48, "moe_layers": [0], "no_rope_layers": [1, 0]},
}
ADAPTERS = {"lora_rank": 3, "lora_alpha": 6}


def save_models(folder):
    """Save random models. Their biases and norms are random too."""
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
    synthetic.save_scorer(folder / "scorer")
    return folder


def peft_folder(model, folder, **changes):
    """Save random adapters with peft, and return the merged model."""
    base = AutoModelForCausalLM.from_pretrained(model)
    keys = {"r": 3, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
    adapted = get_peft_model(base, LoraConfig(**keys))
    draw = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload()
