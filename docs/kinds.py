"""Config keys of each kind of algorithm, which docstrings and signatures do not tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.config.tables import FULL_KL

ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Kind:
    """A kind of algorithm.

    Attributes:
        singular: what an algorithm of this kind is called.
        folder: the folder of its pages.
        keys: the keys whose value is the algorithm's name.
        sections: the config sections that may have its options as keys.
        by_name: the key of the mapping that takes all other options.
        beside: other keys that must be set so that the algorithm has an effect.
        notes: text for each page, below the keys; `{name}` is replaced by the algorithm's name.
        needs, level: the index entries of algorithms that are not registered.
    """

    singular: str
    folder: str
    keys: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    by_name: str = ""
    beside: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    needs: str = ""
    level: str = ""


KL_LOSS: Mapping[str, Any] = {f"{ACTOR}.use_kl_loss": True}
KL_IN_REWARD = (
    "To use it in the reward instead of the loss: "
    "`algorithm.kl_penalty={name} algorithm.use_kl_in_reward=true`."
)
STRAIGHT_THROUGH = (
    "`{name}+` has the values of `{name}` and the gradient of [`k2`](k2.md). On the policy's own samples, "
    "the mean of this gradient is the gradient of the KL: Tang and Munos 2025, "
    "https://arxiv.org/abs/2506.09477."
)

KINDS = {
    "advantage estimator": Kind(
        "advantage estimator",
        "advantages",
        ("algorithm.adv_estimator",),
        ("algorithm",),
        "algorithm.adv_kwargs",
    ),
    "policy loss": Kind(
        "policy loss",
        "policy_losses",
        (f"{ACTOR}.policy_loss.loss_mode",),
        (ACTOR, f"{ACTOR}.policy_loss", "algorithm.rollout_correction"),
        f"{ACTOR}.policy_loss.kwargs",
    ),
    "KL estimator": Kind(
        "KL estimator",
        "kl",
        (f"{ACTOR}.kl_loss_type",),
        beside=KL_LOSS,
        notes=(KL_IN_REWARD, STRAIGHT_THROUGH),
    ),
    "importance weight": Kind(
        "importance weight", "corrections", ("algorithm.rollout_correction.rollout_is",)
    ),
    "rejection statistic": Kind(
        "rejection statistic",
        "rejections",
        ("algorithm.rollout_correction.rollout_rs",),
        beside={"algorithm.rollout_correction.rollout_rs_threshold": "2.0"},
    ),
}
"""The kinds by the `kind` of the specs in a registry."""

NEEDS = {
    "values": "a critic",
    "ref_log_probs": "a reference model",
    "group": "several samples of a prompt",
    "reward_baselines": "a greedy response to each prompt",
    "reward_components": "rewards by component",
    "sum_pi_squared": "the sum of squared probabilities at each token",
    "rollout_log_probs": "the rollout's log-probs",
    "entropy": "the entropy",
}
"""What a run must have for a column that not every run has."""


OTHER = Kind("part of the loop", "parts")
"""Parts that are not one of several alternatives."""

EXACT_KL = Kind(
    "exact KL",
    "kl",
    (f"{ACTOR}.kl_loss_type",),
    beside=KL_LOSS,
    notes=(KL_IN_REWARD,),
    needs=NEEDS["ref_log_probs"],
    level="token",
)

BY_NAME = {"kl_divergence": (EXACT_KL, FULL_KL)}
"""Functions outside the registries that a config selects by name: their kind and that name."""

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "policy_losses/bypass_mode": {"algorithm.rollout_correction.bypass_mode": True},
    "policy_losses/dro": {f"{ACTOR}.policy_loss.dro_beta": 1.0},
    "parts/aggregate": {f"{ACTOR}.loss_agg_mode": "token-mean"},
    "parts/clipped_value_loss": {"critic.cliprange_value": 0.5},
    "parts/apply_kl_penalty": {"algorithm.use_kl_in_reward": True},
    "parts/AdaptiveKLController": {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.type": "adaptive",
        "algorithm.kl_ctrl.target_kl": 0.1,
    },
    "parts/AdaptiveEntropyController": {f"{ACTOR}.adaptive_entropy.enabled": True},
    "parts/groups_with_spread": {"algorithm.filter_groups.enable": True},
    "parts/soft_overlong_punishment": {
        "reward_model.overlong_buffer.enable": True,
        "reward_model.overlong_buffer.len": 4096,
    },
}
"""The keys to set besides or instead of the name, by folder and name."""
