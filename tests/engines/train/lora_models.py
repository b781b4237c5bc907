"""Helpers that the tests of adapters share with their job for two ranks."""

import split_models
import synthetic
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

KEYS = {"lora_rank": 3, "lora_alpha": 6}
STEPS = 3
SEED = 3  # for the random start of the adapters
AGAIN = {"enable_gradient_checkpointing": True, "gradient_checkpointing_mode": "full"}
# kind, tensor-parallel size, FSDP size, sequence-parallel size, further keys of the model
DIVISIONS = {
    "sharded": ("policy", 1, -1, 1, {}),
    "copies": ("policy", 1, 1, 1, {}),
    "sequence": ("policy", 1, -1, 2, {}),
    "tensor": ("policy", 2, -1, 1, {}),
    "recomputed": (
        "policy",
        1,
        -1,
        1,
        {**AGAIN, "enable_activation_offload": True},
    ),
    "recomputed tensor": ("policy", 2, -1, 1, AGAIN),
    "some layers": ("policy", 2, -1, 1, {"target_modules": ("q_proj", "o_proj")}),
    "value": ("value", 1, -1, 1, {}),
    "value tensor": ("value", 2, -1, 1, {}),
}

CASES = {"core": ("sharded", "tensor", "recomputed", "value"), "all": tuple(DIVISIONS)}


def engine_of(folder, kind, tensor, shards, sequence, model, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return synthetic.make_engine(
            folder,
            kind=kind,
            model={"enable_gradient_checkpointing": False, **KEYS, **model},
            fsdp={"tensor_parallel_size": tensor, "fsdp_size": shards},
            sequence_parallel=sequence,
            **options,
        )


def train(engine, rows, kind, steps=STEPS):
    return split_models.train(engine, rows, kind, steps=steps)


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


def adapters(engine):
    """Return the trained parameters (adapters and heads) whole, by name."""
    return {
        engine.module.hf_name(name): p.full_tensor().detach().clone()
        for name, p in engine.module.named_parameters()
        if p.requires_grad
    }


def base_log_probs(engine, rows):
    out = engine.forward(rows, outputs=frozenset({"log_probs"}), micro=synthetic.CUTS["three"], adapter=False)
    return out.ragged("log_probs").values


def plain_log_probs(folder, rows, tensor, shards, sequence):
    """Return the log-probs of an engine without adapters that is divided in the same way."""
    engine = engine_of(folder, "policy", tensor, shards, sequence, {"lora_rank": 0}, frozen=True)
    out = engine.forward(rows, outputs=frozenset({"log_probs"}), micro=synthetic.CUTS["three"])
    return out.ragged("log_probs").values


def batch():
    return synthetic.make_batch(torch.float64)
