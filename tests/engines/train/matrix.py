"""The matrix of features and divisions: what is trained, how, and which ranks share what.

How a model is trained and divided changes no number: `record` returns the same on one rank as on many.
"""

from contextlib import nullcontext

import pytest
import torch

from tandem.engines.weight_sync import checksum
from tandem.models.double_precision import double_precision
from tests.engines.train import synthetic
from tests.engines.train.models import ADAPTERS

STEPS, SEED = 3, 3  # the seed is for the random start of adapters
MIXED = {"model_dtype": "fp32", "dtype": "bf16"}
FULL = {"enable_gradient_checkpointing": True, "gradient_checkpointing_mode": "full"}
KEPT = {"enable_gradient_checkpointing": False}  # recomputed layers do not compute in double precision
PARTLY = {**FULL, "gradient_checkpointing_mode": "every", "gradient_checkpointing_layers": 2}
MIXTURES = ("gpt_oss", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe")
FAMILIES = (*MIXTURES, "gemma2", "gemma3", "olmo3", "phi3", "windowed", "glm4", "starcoder2")
"""Models with windows, sinks, soft caps or experts. They train in double precision."""
EXPERTS, TIED = (*MIXTURES, "llama4"), ("qwen2", "deep", "gemma3")
ON_EXPERTS = {"target_parameters": ("experts.gate_up_proj", "experts.down_proj")}
OFFLOADED = {"enable_activation_offload": True}

FEATURES = {
    "plain": ({}, {}),
    "fp32": ({"precision": "fp32"}, {}),
    "bf16": ({"fsdp": MIXED}, {}),
    "untied": ({"of": "qwen3"}, {}),
    "biases": ({"of": "llama"}, {}),
    "four heads": ({"of": "mistral"}, {}),
    "five layers": ({"of": "deep"}, {"fsdp": {"pipeline_schedule": "gpipe"}}),
    "values": ({"of": "llama", "kind": "value"}, {}),
    "scores": ({"of": "scorer", "kind": "score"}, {"cut": "one"}),
    "recomputed": ({}, {"model": FULL}),
    "partly recomputed": ({"of": "deep"}, {"model": PARTLY, "fsdp": {"pipeline_schedule": "gpipe"}}),
    "offloaded": ({}, {"model": OFFLOADED}),
    "padded": ({}, {"model": {"use_remove_padding": False}}),
    "gathered": ({}, {"fsdp": {"reshard_after_forward": False}}),
    "reduced often": ({}, {"fsdp": {"gradient_sync": "each"}}),
    "all rows at once": ({}, {"cut": "all"}),
    "one row at once": ({}, {"cut": "one"}),
    "by tokens": ({}, {"cut": "tokens"}),
    "a rank without rows": ({}, {"empty": True}),
    "muon": ({"optim": {"optimizer": "muon"}}, {}),
    "foreach": ({"optim": {"fused": False}}, {}),
    "updated on the host": ({"optim": {"optimizer": "adamw_cpu"}}, {}),
    "adapters": ({"model": ADAPTERS}, {}),
    "adapters on some layers": ({"model": {**ADAPTERS, "target_modules": ("q_proj", "o_proj")}}, {}),
    "adapters recomputed": ({"model": ADAPTERS}, {"model": FULL}),
    "adapters offloaded": ({"model": ADAPTERS}, {"model": {**FULL, **OFFLOADED}}),
    **{name: ({"of": name}, {}) for name in FAMILIES},
    **{name: ({"of": name, "model": KEPT}, {}) for name in MIXTURES[1:]},
    "llama4": ({"of": "llama4", "precision": "fp32"}, {}),
    "gpt_oss adapters": ({"of": "gpt_oss", "model": ADAPTERS | ON_EXPERTS}, {}),
    "experts by rows": (
        {"of": "gpt_oss", "optim": {"fused": False}},
        {"cut": "one", "empty": True, "fsdp": {"gradient_sync": "each", "forward_prefetch": True}},
    ),
    "experts partly recomputed": (
        {"of": "gpt_oss", "precision": "fp32", "optim": {"optimizer": "adamw_cpu"}},
        {"model": {"gradient_checkpointing_mode": "ops"}, "fsdp": {"reshard_after_forward": False}},
    ),
    "experts offloaded": ({"of": "gpt_oss", "optim": {"optimizer": "muon"}}, {"model": OFFLOADED}),
    "olmo3 adapters": ({"of": "olmo3", "model": ADAPTERS}, {}),
    "adapters of values": ({"of": "llama", "kind": "value", "model": ADAPTERS}, {}),
}
COPIES = {"fsdp_size": 1, "gradient_sync": "each"}
DIVISIONS = {
    "shards": {},
    "copies": {"fsdp": COPIES},
    "tokens": {"sequence_parallel": 2},
    "tokens of copies": {"sequence_parallel": 2, "fsdp": COPIES},
    "tokens of pairs": {"sequence_parallel": 2, "fsdp": {**COPIES, "fsdp_size": 2}},
    "tokens by four": {"sequence_parallel": 4},
    "layers": {"fsdp": {"tensor_parallel_size": 2}},
    "layers of copies": {"fsdp": {"tensor_parallel_size": 2, **COPIES}},
    "layers and tokens": {"sequence_parallel": 2, "fsdp": {"tensor_parallel_size": 2}},
    "layers by four": {"fsdp": {"tensor_parallel_size": 4}},
    "experts": {"fsdp": {"expert_parallel_size": 2}},
    "experts of copies": {"fsdp": {"expert_parallel_size": 2, **COPIES, "fsdp_size": 2}},
    "experts and tokens": {"sequence_parallel": 2, "fsdp": {"expert_parallel_size": 2}},
    "experts and layers": {"fsdp": {"expert_parallel_size": 2, "tensor_parallel_size": 2}},
    "experts and stages": {"fsdp": {"expert_parallel_size": 2, "pipeline_parallel_size": 2}},
    "experts by four": {"fsdp": {"expert_parallel_size": 4}},
    "stages": {"fsdp": {"pipeline_parallel_size": 2}},
    "stages of copies": {"fsdp": {"pipeline_parallel_size": 2, **COPIES}},
    "stages and layers": {"fsdp": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}},
    "stages and tokens": {"sequence_parallel": 2, "fsdp": {"pipeline_parallel_size": 2}},
    "four stages": {"fsdp": {"pipeline_parallel_size": 4}},
}
ON_TWO = {
    "shards": ("plain",),
    **{"tokens": ("plain", "gpt_oss"), "layers": ("plain", "gpt_oss"), "stages": ("plain",)},
    "experts": ("qwen3_moe", "gpt_oss"),
}
STAGES = (
    *("five layers", "bf16", "values", "scores", "partly recomputed", "reduced often", "all rows at once"),
    *("one row at once", "by tokens", "a rank without rows", "muon"),
)
LONG_ON_TWO = {
    "shards": ("scores", "adapters", "adapters offloaded", "adapters of values", "gpt_oss adapters"),
    "copies": ("plain", "adapters"),
    "tokens": ("fp32", "values", "adapters", "gemma2", "gemma3", "llama4", "windowed"),
    "tokens of copies": ("plain",),
    "layers": (
        *("untied", "bf16", "values", "scores", "recomputed", "offloaded", "adapters", "fp32", "biases"),
        *("adapters recomputed", "adapters on some layers", "adapters of values", "all rows at once"),
        *("padded", "gemma2", "gemma3", "olmo3", "phi3", "llama4", "windowed", "glm4", "starcoder2"),
        *("gpt_oss adapters", "olmo3 adapters"),
    ),
    "experts": (
        *("mixtral", "deepseek_v3", "glm4_moe", "gpt_oss adapters"),
        *("experts by rows", "experts partly recomputed", "experts offloaded"),
    ),
    "experts and tokens": ("gpt_oss",),
    "stages": (*STAGES, "untied", "fp32", "padded", "gathered", "gpt_oss", "gemma3", "llama4"),
}
ON_FOUR = {
    "shards": ("plain",),
    "tokens": ("plain", "fp32", "values"),
    "tokens of pairs": ("plain",),
    "tokens by four": ("plain",),
    "layers": (
        *("plain", "untied", "biases", "fp32", "values", "scores", "recomputed", "offloaded", "bf16"),
        *("gpt_oss", "gemma3", "olmo3"),
    ),
    "layers of copies": ("untied",),
    "layers and tokens": ("plain", "gpt_oss"),
    "layers by four": ("four heads",),
    "experts": ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss", "experts by rows"),
    "experts of copies": ("gpt_oss",),
    "experts and tokens": ("gpt_oss",),
    "experts and layers": ("gpt_oss",),
    "experts and stages": ("gpt_oss",),
    "experts by four": ("gpt_oss", "qwen3_moe"),
    "stages": ("plain", *STAGES, "untied"),
    "stages of copies": ("plain",),
    "stages and layers": ("plain",),
    "stages and tokens": ("untied",),
    "four stages": ("five layers",),
}
JOURNEYS = {
    "2 long": {
        "plain": ("shards", "layers"),
        "adapters": ("shards", "layers"),
        "untied": ("shards", "layers", "stages"),
        **dict.fromkeys(("muon", "foreach", "updated on the host"), ("shards",)),
        "gpt_oss": ("shards", "experts"),
    },
    "4 long": {
        "mixtral": ("shards", "experts"),
        "untied": ("shards", "layers", "stages"),
        "biases": ("shards", "layers"),
    },
}
"""By group and feature: the divisions between which checkpoints are taken."""
GROUPS = {"2 quick": ON_TWO, "2 long": LONG_ON_TWO, "4 long": ON_FOUR}
CELLS = {
    group: [(feature, division) for division, features in table.items() for feature in features]
    for group, table in GROUPS.items()
}


def param(group, value):
    """Return a parameter of a group's test, which is slow if the group is long."""
    name = value if isinstance(value, str) else " / ".join(value)
    return pytest.param(value, id=name, marks=pytest.mark.slow if "long" in group else ())


def engine_of(models, *parts, **options):
    """Make an engine from the parts of a feature and a division. Offloaded activations really are copied."""
    keys = {"of": "qwen2", "model": {}, "fsdp": {}, "optim": {}}
    for part in (*parts, options):
        for name, value in part.items():
            keys[name] = {**keys[name], **value} if isinstance(value, dict) else value
    own = {name: keys.pop(name, None) for name in ("of", "cut", "empty")}
    keys["frozen"] = keys.get("frozen", keys.get("kind") == "score")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return synthetic.copied(synthetic.make_engine(models / own["of"], **keys))


def my_rows(engine, batch, *, empty=False):
    """Return this rank's rows. Of two shares or more, the last has one row, or none if `empty`."""
    size, rank = engine.share.size, engine.share.rank
    ends = [len(batch) * (i + 1) // size for i in range(size)]
    if size > 1:
        ends[-2] = len(batch) - (not empty)
    return batch[ends[rank - 1] if rank else 0 : ends[rank]]


def batch_for(what):
    return synthetic.batch_of(what.get("precision", "fp64"))


def train(engine, rows, kind="policy", cut="three", steps=STEPS):
    """Take some steps and return their metrics and the outputs of a forward pass after them."""
    policy = synthetic.SyntheticLoss("seq-mean-token-mean"), {"log_probs", "entropy", "sum_pi_squared"}
    ways = {"policy": policy, "value": (synthetic.ValueLoss(), {"values"}), "score": (None, {"scores"})}
    (loss, outputs), micro = ways[kind], synthetic.CUTS[cut]
    steps = 0 if loss is None else steps
    metrics = [engine.train_step(rows, loss, micro=micro).to_floats() for _ in range(steps)]
    found = engine.forward(rows, outputs=frozenset(outputs), micro=micro)
    return metrics, {name: found.ragged(name).values for name in outputs}


def record(models, what, how=None, division=None):
    how, division = how or {}, division or {}
    engine = engine_of(models, what, how, division)
    rows = my_rows(engine, batch_for(what), empty=how.get("empty", False))
    started, drawn = synthetic.weights(engine), adapters(engine)
    doubled = what.get("of") in FAMILIES and "precision" not in what
    with double_precision() if doubled else nullcontext():
        metrics, forward = train(engine, rows, what.get("kind", "policy"), how.get("cut", "three"))
    dtypes = (engine.compute_dtype, torch.bfloat16)
    return {
        **{"share": engine.share, "started": started, "drawn": drawn, "metrics": metrics, "forward": forward},
        **{"weights": synthetic.weights(engine), "trained": adapters(engine), "shapes": engine.weight_shapes},
        "digests": {dtype: engine.digest(dtype) for dtype in dtypes},
        "cast": {dtype: dict(engine.weights(dtype=dtype)) for dtype in dtypes},
        **{"info": engine.state_info(), "held": held(engine), "lent": lent(engine)},
        "base": base_is_bare(models, engine, rows, what, division),
        "collectives": engine.take_collectives(),
    }


def adapters(engine):
    """Return the trained parameters, adapters and heads, whole and by name; none for a whole model."""
    if not engine._settings.model.lora_rank:
        return {}
    named = [(name, value) for name, value in engine.module.named_parameters() if value.requires_grad]
    return {engine.module.hf_name(name): value.full_tensor().detach().clone() for name, value in named}


def held(engine):
    """Return the checksum of each part that this rank holds, by name and place; equal places are copies."""
    shard, tensor = (engine.grid.weights[name].get_local_rank() for name in ("shard", "tp"))
    found = {}
    for name, value in engine.module.named_parameters():
        place = name, shard, None if value.placements[-1].is_replicate() else tensor
        found[place] = int(checksum(value.to_local()))
    return found


def lent(engine):
    """Return the embedding as a rollout sees it, or None if the engine does not lend its module."""
    if not engine.unshards:
        return None
    with engine.unsharded() as module:
        return module.get_input_embeddings().weight.detach().clone()


def base_is_bare(models, engine, rows, what, division):
    """Return whether, without its adapters, a policy computes bit for bit what one that has none does."""
    if not engine._settings.model.lora_rank or "kind" in what:
        return True
    bare = engine_of(models, what, division, model={"lora_rank": 0}, frozen=True)
    found = synthetic.output(engine, rows, adapter=False), synthetic.output(bare, rows)
    return torch.equal(*(out.values for out in found))


def records(models, cells):
    return {cell: record(models, *FEATURES[cell[0]], DIVISIONS[cell[1]]) for cell in cells}


def led(found, key):
    """Join the outputs of all rows, in order, from the ranks that lead their share."""
    leaders = sorted((one for one in found if one["share"].leads), key=lambda one: one["share"].rank)
    return {name: torch.cat([one[key][name] for one in leaders]) for name in leaders[0][key]}
