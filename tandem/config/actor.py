"""`actor_rollout_ref.actor` and `.ref`: the policy's update, and the reference policy of the KL terms."""

from __future__ import annotations

from typing import Annotated, Any

from tandem.config import tables
from tandem.config.batching import Batching, LogProbSection
from tandem.config.dynamic_sampling import AdaptiveEntropyConfig
from tandem.config.fsdp import FSDPConfig, RefFSDPConfig
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
KLKind = Annotated[str, OneOf((*tables.KL_KINDS, tables.FULL_KL), own_code=True)]


class PolicyLossConfig(Section):
    """Which policy loss, and its own options."""

    loss_mode: Annotated[
        str, OneOf(tuple(tables.POLICY_LOSSES), tables.POLICY_LOSS_ALIASES, own_code=True)
    ] = key("vanilla", "policy loss, by name or as file.py:function", read_by=LOSSES)
    clip_cov_ratio: float = key(
        0.0002, "clip_cov: share of the response tokens that do not learn", read_by=LOSSES, gt=0, le=1
    )
    clip_cov_lb: float = key(
        1.0,
        "clip_cov: covariance of log-prob and advantage above which a token may be chosen",
        read_by=LOSSES,
    )
    clip_cov_ub: float = key(5.0, "clip_cov: covariance below which it may be", read_by=LOSSES)
    kl_cov_ratio: float = key(
        0.0002,
        "kl_cov: share of the response tokens that are held to the old policy",
        read_by=LOSSES,
        gt=0,
        le=1,
    )
    ppo_kl_coef: float = key(0.1, "kl_cov: weight of what holds them, per nat", read_by=LOSSES, ge=0)
    dro_beta: float | None = key(
        None,
        "dro: weight of the squared log-ratio to the old policy; it must be given",
        read_by=LOSSES,
        gt=0,
    )
    kwargs: dict[str, Any] = key({}, "further options of the policy loss, by name", read_by=LOSSES)


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
        0.2,
        "clip range of the probability ratio, both sides; in nats for geo_mean and dppo_kl",
        read_by="config",
        ge=0,
    )
    clip_ratio_low: float = key(
        meaning="clip range below 1", read_by=LOSSES, inherits=".clip_ratio", ge=0, le=1
    )
    clip_ratio_high: float = key(meaning="clip range above 1", read_by=LOSSES, inherits=".clip_ratio", ge=0)
    clip_ratio_c: float = key(
        3.0, "dual clip: bound of ratio · |advantage| for negative advantages", read_by=LOSSES, gt=1
    )
    tau_pos: float = key(
        1.0, "sapo: how fast positive advantages fade as the policies part", read_by=LOSSES, gt=0
    )
    tau_neg: float = key(1.05, "sapo: the same for other advantages", read_by=LOSSES, gt=0)
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
    adaptive_entropy: AdaptiveEntropyConfig = AdaptiveEntropyConfig()
    use_kl_loss: bool = key(False, "add the KL from the reference policy to the loss", read_by=LOSSES)
    kl_loss_coef: float = key(0.001, "weight of that KL", read_by=LOSSES, ge=0)
    kl_loss_type: KLKind = key(
        "low_var_kl",
        "estimator of that KL (Schulman 2020, k1 to k3), with a + for the gradient of k2, such as k3+; full: "
        "exact over the vocabulary; or file.py:function",
        read_by=LOSSES,
    )
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


class RefConfig(LogProbSection):
    """The frozen policy; it exists when a KL term asks for it."""

    ulysses_sequence_parallel_size: int = key(
        1,
        "devices that share one sequence",
        read_by="workers.actor",
        inherits="actor_rollout_ref.actor.ulysses_sequence_parallel_size",
        ge=1,
    )
    reset_interval: int = key(
        0,
        "training steps after which the reference takes the actor's weights, again and again; 0: never. It "
        "belongs into checkpoints then",
        read_by="trainer.ppo",
        ge=0,
    )
    reset_optimizer: bool = key(
        False,
        "with each reset the actor's optimizer begins anew (ProRL, Liu et al. 2025, arXiv 2505.24864); the "
        "learning rate's schedule goes on",
        read_by="trainer.ppo",
    )
    fsdp_config: RefFSDPConfig = RefFSDPConfig()
