"""Small random models and requests for the rollout tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tandem.protocol import Request, SamplingParams

VOCABULARY = 97
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large enough for peaked distributions
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _build(name: str) -> PreTrainedModel:
    if name == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**_SHAPE, tie_word_embeddings=True))
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=16))
    if name == "llama3_rope":
        return LlamaForCausalLM(
            LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True, rope_parameters=_LLAMA3_ROPE)
        )
    if name == "mistral":
        return MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=None))
    if name == "mistral_window":
        return MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=8))
    if name == "qwen3_window":
        types = ["sliding_attention", "full_attention"]
        config = Qwen3Config(
            **_SHAPE, head_dim=16, use_sliding_window=True, sliding_window=6, layer_types=types
        )
        return Qwen3ForCausalLM(config)
    if name == "gemma":
        return GemmaForCausalLM(GemmaConfig(**_SHAPE, head_dim=16))
    if name == "gemma2":
        softcap = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
        return Gemma2ForCausalLM(
            Gemma2Config(**_SHAPE, head_dim=16, sliding_window=6, query_pre_attn_scalar=9, **softcap)
        )
    if name == "gemma3_text":
        types = ["sliding_attention", "full_attention"]
        return Gemma3ForCausalLM(Gemma3TextConfig(**_SHAPE, head_dim=16, sliding_window=6, layer_types=types))
    raise AssertionError(name)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., PreTrainedModel]:
    """Return a function that builds a small model by name.

    The weights of one name are always the same. All parameters are random, biases and norms too, so that a
    test notices when one is ignored.
    """

    def build(name: str = "qwen2", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        torch.manual_seed(11)
        model = _build(name)
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
    """Return a function that makes n samples of each of the first `count` prompts.

    They have 1 to 30 new tokens.
    """

    def make(count: int = 50, n: int = 1, **params: Any) -> list[Request]:
        lengths = np.random.default_rng(5).integers(1, 31, size=count * n).tolist()
        return [
            Request(
                uid=f"p{index // n}",
                sample=index % n,
                prompt_ids=prompts[index // n],
                params=SamplingParams(**{"max_tokens": lengths[index], **params}),
            )
            for index in range(count * n)
        ]

    return make
