"""Tiny random models, their engines, and each sequence's log-softmax by transformers alone."""

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tandem.config.fsdp import FSDPConfig
from tandem.config.model import BackboneConfig
from tandem.engines.train.fsdp import FSDPEngine

CPU = torch.device("cpu")
SHAPE = {
    **{"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2},
}
CONFIGS = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 16},
    "llama": {"tie_word_embeddings": False},
}


def save(config, folder, *, scorer=False):
    torch.manual_seed(0)
    auto = AutoModelForSequenceClassification if scorer else AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder)
    return folder


def make_engine(folder, kind="policy", precision="fp32", model=None, **keys):
    return FSDPEngine(
        folder,
        kind=kind,
        model=model or BackboneConfig(path=str(folder), **keys),
        fsdp=FSDPConfig(model_dtype=precision, dtype=precision),
        optim=None,
        total_steps=1,
        device=CPU,
    )


def plain_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")


def log_softmax(model, tokens, temperature=1.0):
    """Return (T, V) log-probs of each sequence alone, before each token; zero before the first."""
    parts = [torch.log_softmax(model(row[None]).logits[0] / temperature, -1) for row in tokens]
    return torch.cat([torch.cat([torch.zeros_like(part[:1]), part[:-1]]) for part in parts])


def assert_same_gradients(wrapped, plain, tolerance):
    """Compare the gradients of Tandem's model with those of transformers' model."""
    expected = dict(plain.named_parameters())
    for name, parameter in wrapped.named_parameters():
        want = expected[wrapped.hf_name(name)].grad
        assert (parameter.grad - want).norm() <= tolerance * want.norm(), name
