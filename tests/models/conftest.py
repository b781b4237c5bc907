"""Tiny random models of each supported architecture, saved as Hugging Face folders."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

SHAPE = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
CONFIGS = {
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=False),
}


@pytest.fixture(scope="session", params=list(CONFIGS))
def model_folder(request, tmp_path_factory):
    return _save(CONFIGS[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def qwen2_folder(tmp_path_factory):
    return _save(CONFIGS["qwen2"](), tmp_path_factory.mktemp("qwen2"))


def _save(config, folder):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
