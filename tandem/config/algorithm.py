"""`algorithm`: advantages, and the KL penalty in the reward."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from tandem.config import tables
from tandem.config.actor import KLKind
from tandem.config.dynamic_sampling import FilterGroupsConfig
from tandem.config.rollout_correction import RolloutCorrectionConfig
from tandem.config.section import AsTuple, Names, OneOf, Section, key

WORKER = "workers.batch"


class KLControllerConfig(Section):
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = key(
        "fixed", "adaptive follows target_kl (Ziegler et al. 2019, arXiv 1909.08593)", read_by="trainer"
    )
    kl_coef: float = key(0.001, "the coefficient, or its first value", read_by="trainer", ge=0)
    horizon: int = key(10000, "samples over which adaptive closes a gap", read_by="trainer", gt=0)
    target_kl: float = key(0.1, "what adaptive steers to, nats", read_by="trainer", gt=0)


class AlgorithmConfig(Section):
    """From rewards to advantages."""

    adv_estimator: Annotated[
        str, OneOf(tuple(tables.ADVANTAGES), tables.ADVANTAGE_ALIASES, own_code=True)
    ] = key("gae", "advantage estimator, by name or as file.py:function", read_by=WORKER)
    gamma: float = key(1.0, "discount per token", read_by=WORKER, ge=0, le=1)
    lam: float = key(1.0, "GAE's lambda: 0 trusts the critic, 1 the rewards", read_by=WORKER, ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = key(
        True, "divide GRPO's advantages by the group's deviation; false: Dr.GRPO", read_by=WORKER
    )
    gdpo_reward_weights: Annotated[tuple[float, ...], AsTuple] = key(
        (), "GDPO's weights of the reward's components, in their order; none: all 1", read_by=WORKER
    )
    adv_kwargs: dict[str, Any] = key({}, "further options of the estimator, by name", read_by=WORKER)
    gdpo_reward_keys: Names = key(
        (),
        "names in the reward's dict that are its components, in their order; null: all numbers beside score",
        read_by=WORKER,
    )
    use_kl_in_reward: bool = key(
        False,
        "subtract the KL from the reference policy from the rewards",
        read_by="workers.batch, trainer.ppo",
    )
    kl_penalty: KLKind = key(
        "kl",
        "estimator of that KL (Schulman 2020, k1 to k3); full: exact over the vocabulary; or "
        "file.py:function",
        read_by=WORKER,
    )
    kl_ctrl: KLControllerConfig = KLControllerConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    mask_truncated_completions: bool = key(
        False,
        "leave responses that were cut at data.max_response_length out of every update; they still count in "
        "their group's baseline",
        read_by="trainer.ppo",
    )
