"""`actor_rollout_ref.actor`: the policy update."""

from __future__ import annotations

from typing import Annotated, Any

from tandem.config import tables
from tandem.config.batching import Batching
from tandem.config.fsdp import FSDPConfig
from tandem.config.optim import OptimConfig
from tandem.config.section import OneOf, Section, key

LOSSES = "workers.losses"

Strategy = Annotated[
    str,
    OneOf(
        ("fsdp2",),
        {"fsdp": "fsdp2"},
        {
            "megatron": "this build trains with FSDP2, which splits layers and stages too: set "
            "strategy=fsdp2, fsdp_config.tensor_parallel_size and fsdp_config.pipeline_parallel_size"
        },
    ),
]
Aggregation = Annotated[str, OneOf(tables.AGGREGATIONS)]
KLKind = Annotated[str, OneOf(tables.KL_KINDS)]


class PolicyLossConfig(Section):
    """Which policy loss, and its own options."""

    loss_mode: Annotated[
        str, OneOf(tuple(tables.POLICY_LOSSES), tables.POLICY_LOSS_ALIASES, own_code=True)
    ] = key("vanilla", "policy loss, by name or as file.py:function", read_by=LOSSES)
    kwargs: dict[str, Any] = key({}, "options of the policy loss, by name", read_by=LOSSES)


class ActorConfig(Section):
    """Batches, loss and optimizer of the policy update."""

    strategy: Strategy = key("fsdp2", "training engine (fsdp means fsdp2)", read_by="config")
    ppo_mini_batch_size: int = key(
        256, "prompts per optimizer step, over all devices", read_by="trainer.steps", ge=1
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "samples per micro-batch and device; null: the whole share", read_by="workers.actor", ge=1
    )
    use_dynamic_bsz: bool = key(False, "cut micro-batches by tokens, not by samples", read_by="workers.actor")
    ppo_max_token_len_per_gpu: int = key(
        16384, "tokens per micro-batch and device, with use_dynamic_bsz", read_by="workers.actor", ge=1
    )
    ppo_epochs: int = key(1, "passes over each step's samples", read_by="trainer.steps", ge=1)
    shuffle: bool = key(False, "a new order of the samples in each pass", read_by="trainer.steps")
    clip_ratio: float = key(
        0.2, "PPO clip range of the probability ratio, both sides", read_by="config", ge=0
    )
    clip_ratio_low: float = key(
        meaning="clip range below 1", read_by=LOSSES, inherits=".clip_ratio", ge=0, le=1
    )
    clip_ratio_high: float = key(meaning="clip range above 1", read_by=LOSSES, inherits=".clip_ratio", ge=0)
    clip_ratio_c: float = key(
        3.0, "dual clip: bound of ratio · |advantage| for negative advantages", read_by=LOSSES, gt=1
    )
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    loss_agg_mode: Aggregation = key(
        "token-mean", "how token losses become one number, over the global mini-batch", read_by=LOSSES
    )
    loss_scale_factor: float = key(
        512,
        "divisor of seq-mean-token-sum-norm, tokens",
        read_by=LOSSES,
        inherits="data.max_response_length",
        gt=0,
    )
    entropy_coeff: float = key(0.0, "weight of the entropy bonus", read_by=LOSSES)
    use_kl_loss: bool = key(False, "add the KL from the reference policy to the loss", read_by=LOSSES)
    kl_loss_coef: float = key(0.001, "weight of that KL", read_by=LOSSES, ge=0)
    kl_loss_type: KLKind = key("low_var_kl", "estimator of that KL (Schulman 2020, k1 to k3)", read_by=LOSSES)
    ulysses_sequence_parallel_size: int = key(
        1, "devices that share one sequence", read_by="workers.actor", ge=1
    )
    optim: OptimConfig = OptimConfig()
    fsdp_config: FSDPConfig = FSDPConfig()

    @property
    def train_batching(self) -> Batching:
        return Batching.of(
            dynamic=self.use_dynamic_bsz,
            samples=self.ppo_micro_batch_size_per_gpu,
            tokens=self.ppo_max_token_len_per_gpu,
        )
