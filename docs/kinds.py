"""The keys that ask for an algorithm, which its docstring and its signature do not tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.config.tables import FULL_KL

ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Kind:
    """A kind of algorithms.

    Attributes:
        singular: what one is called.
        folder: of the pages.
        keys: the keys that name one.
        sections: where its options may be keys of their own.
        by_name: the mapping for all other options.
        beside: what else must be set for it to count.
        notes: what each page says below the keys; `{name}` is that of the algorithm.
        needs, level: of those that are not registered, as in the index.
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
    "In the reward instead of the loss: `algorithm.kl_penalty={name} algorithm.use_kl_in_reward=true`."
)
STRAIGHT_THROUGH = (
    "`{name}+` has the values of `{name}` and the gradient of [`k2`](k2.md), whose mean on the policy's own "
    "samples is the gradient of the KL: Tang and Munos 2025, https://arxiv.org/abs/2506.09477."
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
"""By the `kind` of the specs in a registry."""

NEEDS = {
    "values": "a critic",
    "ref_log_probs": "a reference",
    "group": "several samples of a prompt",
    "reward_baselines": "a greedy response to each prompt",
    "reward_components": "rewards by component",
    "sum_pi_squared": "the sum of squared probabilities at each token",
    "rollout_log_probs": "the rollout's log-probs",
    "entropy": "the entropy",
}
"""Columns that a run does not have anyway."""


OTHER = Kind("part of the loop", "parts")
"""Parts that are not one of several to choose from."""

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
"""Functions outside the registries that a name in the config asks for: what they are, and that name."""

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
"""The keys to set besides the name, or instead of one, by folder and name."""
