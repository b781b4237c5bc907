"""Policy losses beside what they go together with: estimators, their own numbers, the updates of a batch, the
aggregation."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.rollout_correction import AT
from tandem.config.root import TrainConfig
from tandem.config.rule import Rule
from tandem.config.unused import ACTOR
from tandem.errors import ConfigError

PER_TOKEN = ("gae", "optimal_token_baseline", "tir_optimal_token_baseline", "vtrace")
"""Estimators that give the tokens of a sequence different advantages."""

REWARDS_TO_GO = ("reinforce_plus_plus", "remax")
"""Those that do where a sequence is not rewarded at its end alone, or its rewards are discounted."""

ONE_ADVANTAGE = ("geo_mean",)
"""Losses that multiply the tokens' ratios, and weigh the product by one advantage."""

NO_RATIO = ("gpg", "reinforce")
"""Losses without the ratio of the present policy and the one that wrote the samples."""

BY_SEQUENCE = ("geo_mean", "gspo", "sapo")
"""Losses defined with the mean over each sequence's tokens, then over sequences."""

_LOSS, _ESTIMATOR = f"{ACTOR}.policy_loss.loss_mode", "algorithm.adv_estimator"
_UPDATES = (f"{ACTOR}.ppo_mini_batch_size", "data.train_batch_size", f"{ACTOR}.ppo_epochs")


def _pair(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    algorithm, loss = config.algorithm, config.actor_rollout_ref.actor.policy_loss.loss_mode
    estimator = algorithm.adv_estimator
    to_go = estimator in REWARDS_TO_GO and (algorithm.use_kl_in_reward or algorithm.gamma < 1)
    if loss in ONE_ADVANTAGE and (to_go or estimator in PER_TOKEN):
        why = ", with the KL in the reward or a discount," if to_go else ""
        yield ConfigError(
            f"it has one advantage for a whole sequence; {estimator}{why} gives each token its own",
            field=_LOSS,
            got=f"{loss} with {_ESTIMATOR}={estimator}",
            expected="an estimator that compares whole responses, such as grpo, rloo or "
            "reinforce_plus_plus_baseline",
            remedy=f"set {_ESTIMATOR}=grpo, or {_LOSS}=gspo, whose tokens may differ",
        )


def _numbers(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    section, at = config.actor_rollout_ref.actor.policy_loss, f"{ACTOR}.policy_loss"
    if section.loss_mode == "dro" and section.dro_beta is None:
        yield ConfigError(
            "missing",
            field=f"{at}.dro_beta",
            expected="a number > 0; a token comes to rest at advantage / dro_beta nats",
            remedy=f"add {at}.dro_beta=…, or set another loss_mode",
        )
    if section.loss_mode == "clip_cov" and section.clip_cov_lb >= section.clip_cov_ub:
        yield ConfigError(
            "no covariance lies between the bounds",
            field=f"{at}.clip_cov_lb",
            got=section.clip_cov_lb,
            expected=f"less than {at}.clip_cov_ub={section.clip_cov_ub}",
            remedy="set one of the two",
        )


def _updates(config: TrainConfig, changed: frozenset[str]) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    loss = actor.policy_loss.loss_mode
    updates = actor.ppo_epochs * -(-config.data.train_batch_size // actor.ppo_mini_batch_size)
    if loss in NO_RATIO and updates > 1:
        yield (
            f"{_LOSS}={loss}: it has no ratio, so {updates - 1} of {updates} updates per batch take samples "
            "of an older policy for the present one's; set ppo_mini_batch_size to data.train_batch_size and "
            "ppo_epochs=1, or a loss with a ratio."
        )
    if loss == "kl_cov" and updates == 1:
        yield (
            f"{_LOSS}=kl_cov: with one update per batch its penalty is always zero; set a smaller "
            "ppo_mini_batch_size, or more ppo_epochs."
        )


def _aggregation(config: TrainConfig, changed: frozenset[str]) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    loss, mode = actor.policy_loss.loss_mode, actor.loss_agg_mode
    if loss in BY_SEQUENCE and mode != "seq-mean-token-mean":
        yield (
            f"{ACTOR}.loss_agg_mode={mode}: {loss} as published has seq-mean-token-mean, where each sequence "
            "counts the same."
        )


def _twice(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    correction = config.algorithm.rollout_correction
    if config.algorithm.adv_estimator == "vtrace" and correction.rollout_is is not None:
        yield ConfigError(
            "the advantages of vtrace hold the importance weights already",
            field=f"{AT}.rollout_is",
            got=correction.rollout_is,
            expected="null",
            remedy=f"remove it, or set {_ESTIMATOR}=gae",
        )


PAIR_RULES: list[Rule[TrainConfig]] = [
    Rule((_ESTIMATOR, _LOSS, "algorithm.use_kl_in_reward", "algorithm.gamma"), _pair),
    Rule(
        (_LOSS, *(f"{ACTOR}.policy_loss.{name}" for name in ("dro_beta", "clip_cov_lb", "clip_cov_ub"))),
        _numbers,
    ),
    Rule((_ESTIMATOR, f"{AT}.rollout_is"), _twice),
    Rule((_LOSS, *_UPDATES), _updates),
    Rule((_LOSS, f"{ACTOR}.loss_agg_mode"), _aggregation),
]
