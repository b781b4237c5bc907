"""Tiny models of every layout that can be divided, and adapters for them."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

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
