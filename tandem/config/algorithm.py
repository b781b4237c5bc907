"""`algorithm`: advantages, and the KL penalty in the reward."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from tandem.config import tables
from tandem.config.actor import KLKind
from tandem.config.dynamic_sampling import FilterGroupsConfig
from tandem.config.needs import Check, own_code
from tandem.config.rollout_correction import RolloutCorrectionConfig
from tandem.config.section import AsTuple, Names, OneOf, Section, When, beside, key, section
from tandem.config.view import root

_IN_REWARD = beside("use_kl_in_reward", True, neutral=(0,))
_ADAPTIVE = beside("type", "adaptive")


def _takes(option: str) -> When:
    """Return the condition that the estimator accepts an option; assume so for a user-defined estimator."""

    def applies(own: Any) -> bool:
        known = tables.needs(own.adv_estimator)
        return known is None or option in known.options

    return When(applies, f"if {{adv_estimator}} takes {option}")


def _reads_components(own: Any) -> bool:
    return tables.needs(own.adv_estimator) is None or own.adv_estimator in tables.READS_COMPONENTS


def _all_cut(own: Any, masks: bool) -> bool:
    rollout = root(own).actor_rollout_ref.rollout
    return bool(masks and rollout.ignore_eos and not rollout.stop)


_SOME_WHOLE = Check(
    _all_cut,
    "every response would be cut at the length limit, and so excluded from learning",
    got="true with actor_rollout_ref.rollout.ignore_eos=true",
    remedy="set actor_rollout_ref.rollout.ignore_eos=false, or {}=false",
)


class KLControllerConfig(Section):
    """The coefficient of the KL penalty in the reward.

    Attributes:
        type: How the coefficient changes during the run. fixed: not at all. adaptive: it is adjusted so that
            the KL approaches target_kl (Ziegler et al. 2019, arXiv 1909.08593).
        kl_coef: The coefficient; with adaptive, its value at the start.
        horizon: For adaptive: number of samples in which the coefficient corrects a deviation from target_kl.
            A larger number means slower changes.
        target_kl: For adaptive: the KL to aim for, in nats.
    """

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = key(0.001, ge=0)
    horizon: int = key(10000, when=_ADAPTIVE, gt=0)
    target_kl: float = key(0.1, when=_ADAPTIVE, gt=0)


class AlgorithmConfig(Section):
    """The conversion of rewards to advantages.

    Attributes:
        adv_estimator: The advantage estimator: a name, or your own function as file.py:function.
        gamma: Discount factor per token.
        lam: Lambda of GAE. 0 relies on the critic's values, 1 on the rewards.
        norm_adv_by_std_in_grpo: Divide GRPO's advantages by the standard deviation of the rewards in the
            group. false: do not divide (Dr.GRPO).
        gdpo_reward_weights: GDPO's weights of the reward's components, in the order of the components. Empty:
            all 1.
        adv_kwargs: Additional options of the estimator: {name: value, …}.
        gdpo_reward_keys: GDPO's components, in order, as names in the dict that a reward function returns.
            null: all numbers except score.
        use_kl_in_reward: Subtract the KL from the reference policy from the rewards.
        kl_penalty: Estimator of that KL: a name (k1 to k3 are from Schulman 2020), full for the exact KL over
            the vocabulary, or your own function as file.py:function.
        mask_truncated_completions: Exclude responses that were cut at data.max_response_length from every
            update. They still count in the baseline of their group.
    """

    adv_estimator: Annotated[
        str, OneOf(tuple(tables.ADVANTAGES), tables.ADVANTAGE_ALIASES, own_code=True)
    ] = key("gae", needs=own_code)
    gamma: float = key(1.0, when=_takes("gamma"), ge=0, le=1)
    lam: float = key(1.0, when=_takes("lam"), ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = key(True, when=_takes("norm_adv_by_std_in_grpo"))
    gdpo_reward_weights: Annotated[tuple[float, ...], AsTuple] = key((), when=_takes("gdpo_reward_weights"))
    adv_kwargs: dict[str, Any] = key({})
    gdpo_reward_keys: Names = key(
        (), when=When(_reads_components, "if {adv_estimator} reads the reward's components")
    )
    use_kl_in_reward: bool = False
    kl_penalty: KLKind = key("kl", when=_IN_REWARD, needs=own_code)
    kl_ctrl: KLControllerConfig = section(KLControllerConfig(), when=_IN_REWARD)
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    filter_groups: FilterGroupsConfig = section(
        FilterGroupsConfig(), when=beside("filter_groups.enable", True)
    )
    mask_truncated_completions: bool = key(False, needs=_SOME_WHOLE)
