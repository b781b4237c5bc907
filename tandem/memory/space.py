"""The configs that levers give: their values, the keys that they set, and which of them go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.config.root import TrainConfig
from tandem.memory.shapes import ModelShape

TRAINING = (
    *("tensor", "sequence", "stages", "shards", "recompute", "param_offload", "optimizer_offload"),
    "gradient_sync",
)
ROLLOUT = ("rollout_tensor", "cache_share")
BUDGETS = ("budget", "log_budget")
LEVERS = (*TRAINING, *ROLLOUT, *BUDGETS)
_POLICY = "actor_rollout_ref"
_MODES: dict[str, dict[str, Any]] = {
    "none": {"enable_gradient_checkpointing": False, "enable_activation_offload": False},
    **{
        mode: {
            "enable_gradient_checkpointing": True,
            "gradient_checkpointing_mode": mode.partition(",")[0],
            "enable_activation_offload": "," in mode,
        }
        for mode in ("ops", "full", "full,offload")
    },
}
Space = Mapping[str, Sequence[Any]]
"""Of each of `LEVERS` the values that are tried; of those that are equally fast the first is taken."""
Choice = tuple[int, ...]
"""For each lever which of its values."""


def default_space(config: TrainConfig, shape: ModelShape, per_node: int = 8) -> dict[str, Sequence[Any]]:
    """The values that `tandem plan --fit` tries: sizes that divide devices and heads, within a node."""
    devices, d = config.trainer.devices_of("actor"), shape.decoder
    sizes = [size for size in (1, 2, 4, 8) if devices % size == 0 and size <= per_node]
    split = [size for size in sizes if not any(n % size for n in (d.heads, d.key_heads, d.intermediate))]
    rollout = config.trainer.devices_of("rollout")
    longest = config.actor_rollout_ref.rollout.longest(config.data)
    least = (-(-longest // max(sizes)) - 1).bit_length()
    batch = config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n * longest
    most = max(least, min(19, (batch * max(sizes) // devices - 1).bit_length()))
    budgets = [2**power for power in range(least, most + 1)]
    return {
        "tensor": split,
        "sequence": [size for size in sizes if d.heads % size == 0],
        "stages": [1, 2, 4] if devices > per_node and devices % 4 == 0 else [1],
        "shards": [-1, per_node] if devices > per_node else [-1],
        "recompute": list(_MODES),
        "param_offload": [False, True],
        "optimizer_offload": [False, True],
        "gradient_sync": ["once", "each"] if devices > 1 else ["auto"],
        "rollout_tensor": [size for size in split if rollout % size == 0],
        "cache_share": [0.9, 0.8, 0.6, 0.4],
        "budget": budgets,
        "log_budget": budgets,
    }


def changes(config: TrainConfig, space: Space, choice: Choice) -> dict[str, Any]:
    """The keys that a choice sets: of all models that are trained, and of the reference's size."""
    at = _values(space, choice)
    sections = [f"{_POLICY}.actor", *(["critic"] if config.needs_critic else [])]
    found: dict[str, Any] = {}
    for section in [*sections, *([f"{_POLICY}.ref"] if config.needs_reference else [])]:
        found[f"{section}.fsdp_config.tensor_parallel_size"] = at["tensor"]
        found[f"{section}.fsdp_config.pipeline_parallel_size"] = at["stages"]
        found[f"{section}.fsdp_config.fsdp_size"] = at["shards"]
        found[f"{section}.ulysses_sequence_parallel_size"] = at["sequence"]
        found[f"{section}.fsdp_config.param_offload"] = at["param_offload"]
        if section in sections:
            found[f"{section}.fsdp_config.optimizer_offload"] = at["optimizer_offload"]
            found[f"{section}.fsdp_config.gradient_sync"] = at["gradient_sync"]
            found[f"{section}.use_dynamic_bsz"] = True
            found[f"{section}.ppo_max_token_len_per_gpu"] = at["budget"]
            model = f"{_POLICY}.model" if section.endswith("actor") else "critic.model"
            found |= {f"{model}.{key}": value for key, value in _MODES[at["recompute"]].items()}
    for section in (f"{_POLICY}.rollout", *([f"{_POLICY}.ref"] if config.needs_reference else [])):
        found[f"{section}.log_prob_use_dynamic_bsz"] = True
        found[f"{section}.log_prob_max_token_len_per_gpu"] = at["log_budget"]
    if config.needs_critic:
        found["critic.forward_max_token_len_per_gpu"] = at["log_budget"]
    found[f"{_POLICY}.rollout.tensor_model_parallel_size"] = at["rollout_tensor"]
    found[f"{_POLICY}.rollout.gpu_memory_utilization"] = at["cache_share"]
    return found


def _values(space: Space, choice: Choice) -> dict[str, Any]:
    return {name: space[name][place] for name, place in zip(LEVERS, choice, strict=True)}


def possible(config: TrainConfig, shape: ModelShape, space: Space, choice: Choice) -> bool:
    """Whether sizes divide devices, heads and layers, and budgets hold the longest sequence."""
    at = _values(space, choice)
    longest = config.actor_rollout_ref.rollout.longest(config.data)
    devices, d = config.trainer.devices_of("actor"), shape.decoder
    split = at["tensor"] * at["stages"]
    parts = devices // split
    shards = parts if at["shards"] == -1 else at["shards"]
    return (
        devices % (split * at["sequence"]) == 0
        and not any(count % at["tensor"] for count in (d.heads, d.key_heads, d.intermediate))
        and d.heads // at["tensor"] % at["sequence"] == 0
        and at["stages"] <= d.layers
        and (shards <= parts and parts % shards == 0)
        and not (
            at["stages"] > 1
            and (at["recompute"] == "full,offload" or config.actor_rollout_ref.model.lora_rank)
        )
        and min(at["budget"], at["log_budget"]) * at["sequence"] >= longest
    )
