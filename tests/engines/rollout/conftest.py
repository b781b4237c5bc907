"""Small random models and requests for the rollout tests."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from tandem.protocol import Request, SamplingParams
from tests.contract.world import SHAPE, VOCABULARY

pytest.register_assert_rewrite("tests.contract.rollout")  # before a test imports it

_SHAPE = SHAPE | {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
_SHAPE |= {"num_key_value_heads": 2}
_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0}
_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_TYPES = {"layer_types": ["sliding_attention", "full_attention"]}
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 9}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_CHUNKS = {"attention_chunk_size": 8, "intermediate_size_mlp": 48, "pad_token_id": 0}
_CHUNKS |= {"layer_types": ["chunked_attention", "full_attention"]}
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}
_LONG |= {"short_factor": [1.0, 1.2, 1.1, 1.0], "long_factor": [1.5, 3.0, 5.0, 8.0]}
_DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}
_DYNAMIC |= {"max_position_embeddings": 16}
_LONGROPE = {"original_max_position_embeddings": 16, "pad_token_id": 0, "rope_parameters": _LONG}
_MIXTURE = {"num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": 2}
_MIXTURE |= {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 12, "n_shared_experts": 1}
_MIXTURE |= {"experts_implementation": "eager"}
_GROUPS = {"n_group": 3, "topk_group": 2, "first_k_dense_replace": 1, "attention_bias": True}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_WIDE, _WINDOW = {"head_dim": 16}, {"head_dim": 16, "sliding_window": 6}
_MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, _WIDE),
    "qwen3_window": (hf.Qwen3ForCausalLM, hf.Qwen3Config, _WINDOW | _TYPES | {"use_sliding_window": True}),
    "llama3_rope": (hf.LlamaForCausalLM, hf.LlamaConfig, _BIASES | {"rope_parameters": _ROPE}),
    "llama_dynamic": (hf.LlamaForCausalLM, hf.LlamaConfig, _DYNAMIC),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {"sliding_window": None}),
    "mistral_window": (hf.MistralForCausalLM, hf.MistralConfig, {"sliding_window": 8}),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig, _WIDE),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, _WINDOW | _CAPS),
    "gemma3_text": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, _WINDOW | _TYPES),
    "gpt_oss": (hf.GptOssForCausalLM, hf.GptOssConfig, _WINDOW | _TYPES | _EXPERTS | _ROTARY),
    "phi3_longrope": (hf.Phi3ForCausalLM, hf.Phi3Config, _LONGROPE),
    "llama4": (hf.Llama4ForCausalLM, hf.Llama4TextConfig, _WIDE | _CHUNKS | _EXPERTS),
    "qwen3_moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, _WIDE | _MIXTURE | {"mlp_only_layers": [1]}),
    "qwen2_moe": (hf.Qwen2MoeForCausalLM, hf.Qwen2MoeConfig, _MIXTURE),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, _MIXTURE | {"sliding_window": 8}),
    "dots1": (hf.Dots1ForCausalLM, hf.Dots1Config, _WIDE | _MIXTURE | _GROUPS),
    "olmoe": (hf.OlmoeForCausalLM, hf.OlmoeConfig, _MIXTURE | {"pad_token_id": 0}),
    "glm4_moe": (hf.Glm4MoeForCausalLM, hf.Glm4MoeConfig, _WIDE | _MIXTURE | _GROUPS | {"use_qk_norm": True}),
    "deepseek_v3": (
        hf.DeepseekV3ForCausalLM,
        lambda **sizes: hf.DeepseekV3Config(**sizes | {"num_key_value_heads": 4}),
        _MIXTURE | _GROUPS | _LATENT | {"v_head_dim": 8},
    ),
}


@pytest.fixture(scope="session")
def tiny() -> Callable[..., hf.PreTrainedModel]:
    """Return a function that builds a small model by name, with random biases and norms too."""

    def build(name: str = "qwen2", dtype: torch.dtype = torch.float32) -> hf.PreTrainedModel:
        torch.manual_seed(11)
        kind, config, options = _MODELS[name]
        model = kind(config(**_SHAPE | options))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        return model.to(dtype).eval()

    return build


@pytest.fixture
def prompts() -> list[np.ndarray]:
    """Return 50 prompts of 1 to 40 tokens."""
    rng = np.random.default_rng(3)
    return [rng.integers(1, VOCABULARY, size=length) for length in rng.integers(1, 41, size=50)]


@pytest.fixture
def make_requests(prompts: list[np.ndarray]) -> Callable[..., list[Request]]:
    """Return a function that makes n samples of each of the first `count` prompts, of 1 to 30 new tokens."""

    def make(count: int = 50, n: int = 1, **params: Any) -> list[Request]:
        lengths = np.random.default_rng(5).integers(1, 31, size=count * n).tolist()
        settings = [SamplingParams(**{"max_tokens": length, **params}) for length in lengths]
        return [Request(f"p{i // n}", i % n, prompts[i // n], each) for i, each in enumerate(settings)]

    return make
