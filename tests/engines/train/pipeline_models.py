"""Helpers that the tests of pipeline parallelism share with their job.

Tiny models with two and five layers, with and without a tied embedding, and the divisions to compare.
"""

import split_models
import synthetic
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from tandem.engines.train.base import MicroBatching

PIPE = {"pipeline_parallel_size": 2}
CASES = {
    "tied": ("qwen2", "policy", "fp64", PIPE, {}),
    "untied": ("qwen3", "policy", "fp64", PIPE, {}),
    "uneven stages": ("deep", "policy", "fp64", {**PIPE, "pipeline_schedule": "gpipe"}, {}),
    "fp32": ("qwen2", "policy", "fp32", PIPE, {}),
    "values": ("llama", "value", "fp64", PIPE, {}),
    "padded": ("qwen2", "policy", "fp64", PIPE, {"model": {"use_remove_padding": False}}),
    "gathered": ("qwen2", "policy", "fp64", {**PIPE, "reshard_after_forward": False}, {}),
}
CORE = {name: CASES[name] for name in ("tied", "uneven stages", "values")}
ON_FOUR = {
    **{name: CASES[name] for name in ("tied", "untied", "uneven stages", "values")},
    "copies": ("qwen2", "policy", "fp64", {**PIPE, "fsdp_size": 1}, {}),
    "four stages": ("deep", "policy", "fp64", {"pipeline_parallel_size": 4}, {}),
    "layers split": ("qwen2", "policy", "fp64", {**PIPE, "tensor_parallel_size": 2}, {}),
    "sequences split": ("qwen3", "policy", "fp64", PIPE, {"sequence_parallel": 2}),
}
MUON = {"optim": {"optimizer": "muon"}}
RECOMPUTED = {
    "model": {
        "enable_gradient_checkpointing": True,
        "gradient_checkpointing_mode": "every",
        "gradient_checkpointing_layers": 2,
    }
}
# With two stages, a micro-batch of all rows is cut in two. A micro-batch of one row is not.
LOTS = {"all": MicroBatching(), "one": MicroBatching(max_samples=1), "tokens": MicroBatching(max_tokens=40)}


def save_models(folder):
    split_models.save_models(folder)
    torch.manual_seed(2)
    config = Qwen2Config(**{**synthetic.SHAPE, "num_hidden_layers": 5})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "deep")
    return folder


def engine_of(folder, name, kind, precision, fsdp, options, **more):
    return synthetic.make_engine(
        folder / name, kind=kind, precision=precision, fsdp=fsdp, **{**options, **more}
    )
