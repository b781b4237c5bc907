"""`actor_rollout_ref.actor` and `.ref`: the policy's update, and the reference policy of the KL terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Annotated, Any

from tandem.config import tables
from tandem.config.batching import BY_SAMPLES, BY_TOKENS, Batching, LogProbSection
from tandem.config.cluster import ByName
from tandem.config.dynamic_sampling import AdaptiveEntropyConfig
from tandem.config.fsdp import FORWARD_ALONE, OPTIMIZER_HAS_STATE_HERE, FSDPConfig, RefFSDPConfig
from tandem.config.mixture import RouterReplayConfig
from tandem.config.needs import Check, divides_batch, holds_longest, names, not_a_model, own_code
from tandem.config.optim import OptimConfig
from tandem.config.section import LocalPath, OneOf, Section, When, beside, key, section
from tandem.config.view import path, root
from tandem.errors import ConfigError

Strategy = Annotated[
    str,
    OneOf(
        ("fsdp2",),
        {"fsdp": "fsdp2"},
    ),
]
Aggregation = Annotated[str | None, OneOf(tables.AGGREGATIONS)]
KLKind = Annotated[str, OneOf((*tables.KL_KINDS, tables.FULL_KL), own_code=True)]


def _takes(option: str, loss: str = "policy_loss.loss_mode") -> When:
    """Return the condition that the policy loss accepts an option. It is true for a user-defined loss."""

    def applies(own: Any) -> bool:
        options = tables.loss_options(attrgetter(loss)(own))
        return options is None or option in options

    return When(applies, f"if {{{loss}}} takes {option}")


def _clips(own: Any) -> bool:
    """Return whether the loss has a clip range. Only losses of bypass mode can lack a clip range."""
    correction = root(own).algorithm.rollout_correction
    return not correction.bypass_mode or correction.loss_type == "ppo_clip"


_CLIPS = When(_clips, "if algorithm.rollout_correction.loss_type=ppo_clip")
_LOW, _HIGH, _DUAL = ((_takes(f"clip_ratio_{side}"), _CLIPS) for side in ("low", "high", "c"))
_KL = beside("use_kl_loss", True, neutral=(0,))


_DRO_BETA = Check(
    lambda own, beta: beta is None and own.loss_mode == "dro",
    "missing",
    expected="a number > 0; the log-ratio of a token converges to advantage / dro_beta nats",
    remedy="add {}=…, or set another loss_mode",
)
_COVARIANCES = Check(
    lambda own, low: own.loss_mode == "clip_cov" and low >= own.clip_cov_ub,
    "no covariance lies between the bounds",
    expected="less than {clip_cov_ub=}",
    remedy="change one of the two",
)


def _begins_outside(own: Any, coefficient: float) -> bool:
    bounds = own.adaptive_entropy
    low, high = bounds.min_ent_coef, bounds.max_ent_coef
    return bool(bounds.enabled and low <= high and not low <= coefficient <= high)


_WITHIN_BOUNDS = Check(
    _begins_outside,
    "the start value is outside its bounds",
    expected="{=adaptive_entropy.min_ent_coef} to {=adaptive_entropy.max_ent_coef}, the bounds of "
    "{adaptive_entropy}",
    remedy="set {}={=adaptive_entropy.min_ent_coef}, or widen the bounds",
)


def _leaves_no_ratio(own: Any, clip: float) -> bool:
    loss = own.policy_loss.loss_mode
    bounded = tables.loss_options(loss) and loss not in tables.LOW_ABOVE_ONE
    return bool(clip == own.clip_ratio_low > 1 and bounded)


_LEAVES_A_RATIO = Check(
    _leaves_no_ratio,
    "a probability ratio never falls below 0, so a range above 1 has no meaning here",
    expected="0 to 1 with {policy_loss.loss_mode=}",
    remedy="set {clip_ratio_low}=1, which has the same effect",
)


class PolicyLossConfig(Section):
    """The policy loss and its options.

    Attributes:
        loss_mode: The policy loss: a name, or your own function as file.py:function.
        clip_cov_ratio: For clip_cov: fraction of the response tokens that are excluded from learning.
        clip_cov_lb: For clip_cov: a token may be excluded if the covariance of its log-prob and advantage is
            above this value.
        clip_cov_ub: For clip_cov: a token may be excluded if the covariance of its log-prob and advantage is
            below this value.
        kl_cov_ratio: For kl_cov: fraction of the response tokens that a KL penalty keeps close to the old
            policy.
        ppo_kl_coef: For kl_cov: weight of that KL penalty, per nat.
        dro_beta: For dro: weight of the squared log-ratio to the old policy. It has no default, so you must
            set it.
        kwargs: Additional options of the policy loss: {name: value, …}.
    """

    loss_mode: Annotated[
        str, OneOf(tuple(tables.POLICY_LOSSES), tables.POLICY_LOSS_ALIASES, own_code=True)
    ] = key("vanilla", needs=own_code)
    clip_cov_ratio: float = key(0.0002, when=_takes("clip_cov_ratio", "loss_mode"), gt=0, le=1)
    clip_cov_lb: float = key(1.0, when=_takes("clip_cov_lb", "loss_mode"), needs=_COVARIANCES)
    clip_cov_ub: float = key(5.0, when=_takes("clip_cov_ub", "loss_mode"))
    kl_cov_ratio: float = key(0.0002, when=_takes("kl_cov_ratio", "loss_mode"), gt=0, le=1)
    ppo_kl_coef: float = key(0.1, when=_takes("ppo_kl_coef", "loss_mode"), ge=0)
    dro_beta: float | None = key(None, when=_takes("dro_beta", "loss_mode"), needs=_DRO_BETA, gt=0)
    kwargs: dict[str, Any] = key({})


class ActorConfig(Section):
    """Batches, loss and optimizer of the policy update.

    Attributes:
        strategy: Training engine. fsdp is another name for fsdp2.
        ppo_mini_batch_size: Prompts per optimizer step, over all devices.
        ppo_micro_batch_size_per_gpu: Samples per micro-batch and device. null: all samples of the mini-batch
            that are on the device.
        use_dynamic_bsz: Limit micro-batches by their number of tokens instead of their number of samples.
        ppo_max_token_len_per_gpu: Tokens per micro-batch and device, with use_dynamic_bsz=true.
        ppo_epochs: Number of passes over the samples of each step.
        shuffle: Shuffle the samples before each pass.
        clip_ratio: How far the probability ratio may differ from 1, in both directions, before it is clipped.
            In nats for geo_mean and dppo_kl.
        clip_ratio_low: How far the probability ratio may fall below 1 before it is clipped. With cispo, a
            value above 1 means that there is no lower bound.
        clip_ratio_high: How far the probability ratio may rise above 1 before it is clipped.
        clip_ratio_c: Upper bound of the probability ratio for tokens with a negative advantage (dual
            clipping).
        tau_pos: For sapo: how fast the weight of tokens with a positive advantage falls as the new policy
            moves away from the old policy.
        tau_neg: For sapo: like tau_pos, for tokens whose advantage is zero or negative.
        loss_agg_mode: How the losses of all tokens are combined into one number, over the global mini-batch.
            null: the aggregation that the loss was published with, which is seq-mean-token-mean for gspo,
            geo_mean and sapo, seq-mean-token-sum for reinforce, and token-mean for all other losses.
        loss_scale_factor: For seq-mean-token-sum-norm: the divisor of the sums, in tokens.
        entropy_coeff: Weight of the entropy bonus in the loss.
        use_kl_loss: Add the KL divergence from the reference policy to the loss.
        kl_loss_coef: Weight of that KL divergence in the loss.
        kl_loss_type: Estimator of that KL divergence: a name (k1 to k3 are from Schulman 2020), a name with +
            for the gradient of k2 (such as k3+), full for the exact KL over the vocabulary, or your own
            function as file.py:function.
        router_replay: Replay of the choice of experts, for mixtures of experts.
        ulysses_sequence_parallel_size: Number of devices that share the computation of one sequence (Ulysses
            sequence parallelism).
    """

    strategy: Strategy = key("fsdp2", resumed="reported")
    ppo_mini_batch_size: int = key(1024, inherits="data.train_batch_size", needs=divides_batch, ge=1)
    ppo_micro_batch_size_per_gpu: int | None = key(None, when=BY_SAMPLES, ge=1, resumed="reported")
    use_dynamic_bsz: bool = key(False, resumed="reported")
    ppo_max_token_len_per_gpu: int = key(16384, when=BY_TOKENS, needs=holds_longest, ge=1, resumed="reported")
    ppo_epochs: int = key(1, ge=1)
    shuffle: bool = False
    clip_ratio: float = key(0.2, when=_LOW, needs=_LEAVES_A_RATIO, ge=0)
    clip_ratio_low: float = key(inherits=".clip_ratio", when=_LOW, needs=_LEAVES_A_RATIO, ge=0)
    clip_ratio_high: float = key(inherits=".clip_ratio", when=_HIGH, ge=0)
    clip_ratio_c: float = key(3.0, when=_DUAL, gt=1)
    tau_pos: float = key(1.0, when=_takes("tau_pos"), gt=0)
    tau_neg: float = key(1.05, when=_takes("tau_neg"), gt=0)
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    loss_agg_mode: Aggregation = None
    loss_scale_factor: float = key(
        512,
        inherits="data.max_response_length",
        when=When(
            lambda own: "seq-mean-token-sum-norm" in (own.loss_agg_mode, root(own).critic.loss_agg_mode),
            "if {loss_agg_mode}=seq-mean-token-sum-norm",
        ),
        gt=0,
    )
    entropy_coeff: float = key(0.0, needs=_WITHIN_BOUNDS)
    adaptive_entropy: AdaptiveEntropyConfig = section(
        AdaptiveEntropyConfig(), when=beside("adaptive_entropy.enabled", True)
    )
    use_kl_loss: bool = False
    kl_loss_coef: float = key(0.001, when=_KL, ge=0)
    kl_loss_type: KLKind = key("low_var_kl", when=_KL, needs=own_code)
    ulysses_sequence_parallel_size: int = key(1, ge=1, resumed="reported")
    router_replay: RouterReplayConfig = RouterReplayConfig()
    optim: OptimConfig = OptimConfig()
    fsdp_config: FSDPConfig = section(FSDPConfig(), below={"optimizer_offload": OPTIMIZER_HAS_STATE_HERE})

    @property
    def aggregation(self) -> str:
        """The configured aggregation of token losses, or the one that the policy loss was published with."""
        return self.loss_agg_mode or tables.published_aggregation(self.policy_loss.loss_mode)

    @property
    def train_batching(self) -> Batching:
        return Batching.of(
            self.use_dynamic_bsz, self.ppo_micro_batch_size_per_gpu, self.ppo_max_token_len_per_gpu
        )


_OWN_ENGINE = When(
    lambda own: not root(own).reference_is_the_actor,
    "if the reference policy has its own engine; with actor_rollout_ref.model.lora_rank above 0, the actor's "
    "model without its adapters is the reference",
    notice=True,
)


_RESETTABLE = Check(
    lambda own, interval: interval and root(own).needs_reference and root(own).reference_is_the_actor,
    "the reference is the base model of the actor's adapters and has no weights of its own to reset",
    got="{=} with {actor_rollout_ref.model.lora_rank=}",
    expected="0, or a reference in a separate pool",
    remedy="set {}=0, or place ref and actor in different pools of trainer.resource_pools",
)


class ReferenceTerm(Section):
    """The config of one reference policy, if a run has several reference policies.

    Attributes:
        path: Hugging Face folder of the reference; None: the policy at the start of the run.
        weight: the weight of the KL to this reference in the sum; 0: the KL is reported but not used.
    """

    path: LocalPath | None = None
    weight: float = key(1.0, ge=0)


def _reference_folders(own: Any, name: str) -> Iterator[ConfigError]:
    for label, term in own.models.items():
        yield from not_a_model(term.path, "config.json", f"{path(own, name)}.{label}.path")


_ONE_RESET = Check(
    lambda own, interval: own.models and interval,
    "only a single reference can be reset, and there are several",
    field="reset_interval",
    expected="0",
    remedy="set it to 0, or remove {models}",
)
_ONE_EXACT = Check(
    lambda own, models: models and root(own).exact_kl,
    "the exact KL keeps the output head of one reference with the actor, and there are several references",
    got="{=}",
    expected=f"one reference, or an estimator such as k3+ instead of {tables.FULL_KL}",
    remedy="remove {}, or change algorithm.kl_penalty and actor_rollout_ref.actor.kl_loss_type",
)


ONE_REFERENCE: Mapping[str, float] = {"ref_log_probs": 1.0}
"""For a run with one reference: a dict from the column of its log-probs to the weight of its KL."""


def reference_name(column: str) -> str:
    """Return NAME for the log-probs column `ref_log_probs.NAME` or the role `ref.NAME` of a reference."""
    return column.partition(".")[2]


class RefConfig(LogProbSection):
    """The frozen reference policies. A run has reference policies only if a KL term needs them.

    Attributes:
        models: Several references instead of one: {name: {path: …, weight: 1.0}, …}. The KL of the run is the
            weighted sum of the KLs to all references. All references must use the policy's tokens. Without
            path, a reference is the policy at the start of the run. In trainer.placement, a reference is
            called ref.NAME; ref means all references. Empty: one reference, the policy at the start of the
            run.
        ulysses_sequence_parallel_size: Number of devices that share the computation of one sequence (Ulysses
            sequence parallelism).
        reset_interval: Copy the actor's weights to the reference every reset_interval training steps. 0:
            never. Otherwise, checkpoints also contain the reference.
        reset_optimizer: At each such reset, also reset the actor's optimizer state (ProRL, Liu et al. 2025,
            arXiv 2505.24864). The learning rate schedule continues.
    """

    models: Annotated[dict[str, ReferenceTerm], ByName] = key(
        {}, needs=(names, _reference_folders, _ONE_RESET, _ONE_EXACT)
    )
    ulysses_sequence_parallel_size: int = key(
        1,
        inherits="actor_rollout_ref.actor.ulysses_sequence_parallel_size",
        when=_OWN_ENGINE,
        ge=1,
        resumed="reported",
    )
    reset_interval: int = key(0, needs=_RESETTABLE, ge=0)
    reset_optimizer: bool = key(
        False, when=When(lambda own: own.reset_interval > 0, "if {reset_interval} is above 0")
    )
    fsdp_config: RefFSDPConfig = section(RefFSDPConfig(), when=_OWN_ENGINE, below=FORWARD_ALONE)

    @property
    def references(self) -> Mapping[str, ReferenceTerm]:
        """A dict from role to the config of a reference."""
        return {f"ref.{name}": term for name, term in self.models.items()} or {"ref": ReferenceTerm()}

    @property
    def columns(self) -> Mapping[str, float]:
        """A dict from the column of a reference's log-probs to the weight of its KL."""
        return {f"ref_log_probs.{name}": term.weight for name, term in self.models.items()} or ONE_REFERENCE
