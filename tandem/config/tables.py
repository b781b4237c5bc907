"""Facts about algorithms for config checks, which must not import the algorithms because they need torch.

A test compares these tables with the registries of `tandem.algorithms`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Needs:
    """The requirements of an advantage estimator.

    Attributes:
        critic: whether the estimator needs the values of a critic.
        group: whether the estimator needs several samples of one prompt.
        options: the names of the estimator's options.
    """

    critic: bool
    group: bool
    options: tuple[str, ...]


ADVANTAGES = {
    "gae": Needs(critic=True, group=False, options=("gamma", "lam")),
    "vtrace": Needs(critic=True, group=False, options=("gamma", "lam", "rho_bar", "c_bar")),
    "grpo": Needs(critic=False, group=True, options=("norm_adv_by_std_in_grpo", "epsilon")),
    "dr_grpo": Needs(critic=False, group=True, options=()),
    "grpo_passk": Needs(critic=False, group=True, options=("norm_adv_by_std_in_grpo", "epsilon")),
    "gdpo": Needs(
        critic=False, group=True, options=("norm_adv_by_std_in_grpo", "epsilon", "gdpo_reward_weights")
    ),
    "maxrl": Needs(critic=False, group=True, options=("epsilon",)),
    "rloo": Needs(critic=False, group=True, options=()),
    "opo": Needs(critic=False, group=True, options=()),
    "gpg": Needs(critic=False, group=True, options=("f_norm",)),
    "remax": Needs(critic=False, group=False, options=()),
    "optimal_token_baseline": Needs(critic=False, group=True, options=("handle_zero_tail", "epsilon")),
    "tir_optimal_token_baseline": Needs(critic=False, group=True, options=("handle_zero_tail", "epsilon")),
    "reinforce_plus_plus": Needs(critic=False, group=False, options=("gamma",)),
    "reinforce_plus_plus_baseline": Needs(critic=False, group=True, options=()),
}

ADVANTAGE_ALIASES = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}

ADVANTAGE_KEYS = ("gamma", "lam", "norm_adv_by_std_in_grpo", "gdpo_reward_weights")
"""The options of advantage estimators that have a separate key in `algorithm`."""

_CLIP = ("clip_ratio_low", "clip_ratio_high")

POLICY_LOSSES: dict[str, tuple[str, ...]] = {
    "bypass_mode": ("loss_type", *_CLIP, "clip_ratio_c"),
    "cispo": _CLIP,
    "clip_cov": (*_CLIP, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
    "dppo_kl": (*_CLIP, "clip_ratio_c"),
    "dppo_tv": (*_CLIP, "clip_ratio_c"),
    "dro": ("dro_beta",),
    "geo_mean": _CLIP,
    "gpg": (),
    "gspo": _CLIP,
    "kl_cov": ("kl_cov_ratio", "ppo_kl_coef"),
    "reinforce": (),
    "sapo": ("tau_pos", "tau_neg"),
    "vanilla": (*_CLIP, "clip_ratio_c"),
}
"""The options of each policy loss."""

POLICY_LOSS_ALIASES = {"gmpo": "geo_mean"}

BY_SEQUENCE = ("geo_mean", "gspo", "sapo")
"""Losses that were published with the mean over the tokens of each sequence, then over the sequences."""

LOW_ABOVE_ONE = ("cispo", "dppo_kl", "geo_mean")
"""Losses whose lower clip range may be above 1, because it is in nats or means "no lower bound"."""

LOSS_KEYS = {
    **{name: name for name in (*_CLIP, "clip_ratio_c", "tau_pos", "tau_neg")},
    **{
        name: f"policy_loss.{name}"
        for name in (
            "clip_cov_ratio",
            "clip_cov_lb",
            "clip_cov_ub",
            "kl_cov_ratio",
            "ppo_kl_coef",
            "dro_beta",
        )
    },
}
"""A dict from an option of policy losses to its key in the actor's section."""

IMPORTANCE_WEIGHTS = ("token", "sequence", "geometric")

RATIO_REJECTIONS = ("token_k1", "seq_sum_k1", "seq_mean_k1")
"""Rejection modes whose bounds apply to a ratio, from above and below."""

REJECTIONS = (
    *RATIO_REJECTIONS,
    *(f"{level}_{k}" for k in ("k2", "k3") for level in ("token", "seq_sum", "seq_mean", "seq_max")),
)

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)

KL_KINDS = tuple(
    name + plus for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3") for plus in ("", "+")
)
"""Estimators of the KL from the sampled tokens.

An estimator with a + has the same value as without it, but the gradient of k2.
"""

FULL_KL = "full"
"""The exact KL over the whole vocabulary."""

READS_COMPONENTS = frozenset({"gdpo"})
"""Advantage estimators that read named components of a reward."""

READS_SQUARES = frozenset({"optimal_token_baseline", "tir_optimal_token_baseline"})
"""Advantage estimators that read the sum of squared probabilities."""

ROLLOUT_ENGINES = ("native", "hf", "vllm", "openai", "sglang", "tgi")

SERVER_ENGINES = ("openai", "sglang", "tgi")
"""Rollout engines that run on servers."""

FIXED_WEIGHTS = ("openai", "tgi")
"""Rollout engines whose weights cannot be updated."""

LOGGERS = (
    "console",
    "file",
    "tensorboard",
    "wandb",
    "mlflow",
    "swanlab",
    "vemlp_wandb",
    "clearml",
    "trackio",
)


def needs(estimator: str) -> Needs | None:
    """Return the requirements of an estimator; None for a user-defined estimator."""
    return ADVANTAGES.get(ADVANTAGE_ALIASES.get(estimator, estimator))


def published_aggregation(loss: str) -> str:
    """Return the aggregation that a policy loss was published with; token-mean for a user-defined loss."""
    loss = POLICY_LOSS_ALIASES.get(loss, loss)
    if loss == "reinforce":
        return "seq-mean-token-sum"
    return "seq-mean-token-mean" if loss in BY_SEQUENCE else "token-mean"


def loss_options(loss: str) -> tuple[str, ...] | None:
    """Return the options of a policy loss; None for a user-defined loss."""
    return POLICY_LOSSES.get(POLICY_LOSS_ALIASES.get(loss, loss))
