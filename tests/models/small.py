"""Tiny random models, their engines, and each sequence's log-softmax by transformers alone."""

import torch
from torch import nn
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
# Other rules of logits, biases of the head, and other names of the decoder and its layers.
OTHER_HEADS = {
    "gemma2": {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 2.0},
    "hyperclovax": {"logits_scaling": 2.0},
    "phi": {},
    "gpt_neox": {"tie_word_embeddings": False},
    "gpt2": {"tie_word_embeddings": True},
}


def save(config, folder, *, scorer=False):
    torch.manual_seed(0)
    auto = AutoModelForSequenceClassification if scorer else AutoModelForCausalLM
    model = auto.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # biases start at zero
            nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
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
    """Return transformers' model in float64. Eager attention would round to fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    model.config._attn_implementation = "sdpa"  # some versions do not accept it for Gemma 2
    return model


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
