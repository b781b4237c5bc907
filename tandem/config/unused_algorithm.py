"""Keys of the algorithm, its losses and its KL that count only together with others."""

from __future__ import annotations

from collections.abc import Callable

from tandem.config.check_correction import CORRECTION_ERRORS
from tandem.config.root import TrainConfig
from tandem.config.tables import ADVANTAGE_KEYS, LOSS_KEYS, READS_COMPONENTS, loss_options, needs
from tandem.config.use import Use

_ACTOR, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"


def _estimator_takes(option: str) -> Callable[[TrainConfig], bool]:
    """Whether the advantage estimator takes `option`; a user's own might."""

    def applies(config: TrainConfig) -> bool:
        known = needs(config.algorithm.adv_estimator)
        return known is None or option in known.options

    return applies


def _loss_takes(option: str) -> Callable[[TrainConfig], bool]:
    """Whether the policy loss takes `option`; a user's own might."""

    def applies(config: TrainConfig) -> bool:
        options = loss_options(config.actor_rollout_ref.actor.policy_loss.loss_mode)
        return options is None or option in options

    return applies


def _scales(config: TrainConfig) -> bool:
    modes = (config.actor_rollout_ref.actor.loss_agg_mode, config.critic.loss_agg_mode)
    return "seq-mean-token-sum-norm" in modes


ALGORITHM_ERRORS: list[Use[TrainConfig]] = [
    Use(
        (f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type"),
        (f"{_ACTOR}.use_kl_loss",),
        lambda config: config.actor_rollout_ref.actor.use_kl_loss,
        f"with {_ACTOR}.use_kl_loss=true",
        neutral=(0,),
    ),
    Use(
        ("algorithm.kl_penalty", "algorithm.kl_ctrl."),
        ("algorithm.use_kl_in_reward",),
        lambda config: config.algorithm.use_kl_in_reward,
        "with algorithm.use_kl_in_reward=true",
        neutral=(0,),
    ),
    Use(
        ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
        ("algorithm.kl_ctrl.type", "algorithm.use_kl_in_reward"),
        lambda config: config.algorithm.kl_ctrl.type == "adaptive" or not config.algorithm.use_kl_in_reward,
        "with algorithm.kl_ctrl.type=adaptive",
    ),
    *(
        Use(
            (f"algorithm.{option}",),
            ("algorithm.adv_estimator",),
            _estimator_takes(option),
            f"with an algorithm.adv_estimator that takes {option}",
        )
        for option in ADVANTAGE_KEYS
    ),
    *(
        Use(
            (f"{_ACTOR}.{key}",),
            (f"{_ACTOR}.policy_loss.loss_mode",),
            _loss_takes(option),
            f"with an {_ACTOR}.policy_loss.loss_mode that takes {option}",
        )
        for option, key in [("clip_ratio_low", "clip_ratio"), *LOSS_KEYS.items()]
    ),
    Use(
        (f"{_REF}.reset_optimizer",),
        (f"{_REF}.reset_interval",),
        lambda config: config.actor_rollout_ref.ref.reset_interval > 0,
        f"with {_REF}.reset_interval above 0",
    ),
    Use(
        ("algorithm.gdpo_reward_keys",),
        ("algorithm.adv_estimator",),
        lambda config: (
            needs(config.algorithm.adv_estimator) is None
            or config.algorithm.adv_estimator in READS_COMPONENTS
        ),
        "with an algorithm.adv_estimator that reads the reward's components",
    ),
    Use(
        (f"{_ACTOR}.loss_scale_factor",),
        (f"{_ACTOR}.loss_agg_mode", "critic.loss_agg_mode"),
        _scales,
        f"with {_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    ),
    *CORRECTION_ERRORS,
]
