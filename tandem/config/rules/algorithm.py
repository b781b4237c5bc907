"""Rules of algorithms: estimators, policy losses and KL terms beside what they go together with."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.rollout_correction import AT
from tandem.config.root import TrainConfig
from tandem.config.schema import value_at
from tandem.config.section import nearest_remedy
from tandem.config.tables import (
    ADVANTAGE_KEYS,
    BY_SEQUENCE,
    FULL_KL,
    LOSS_KEYS,
    READS_SQUARES,
    loss_options,
    needs,
)
from tandem.config.verl import DEAF
from tandem.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
BYPASS = "bypass_mode"
"""The policy loss of that mode."""

_ESTIMATOR, _OWN_LOSS = "algorithm.adv_estimator", f"{ACTOR}.policy_loss"
_LOSS, _N = f"{_OWN_LOSS}.loss_mode", "actor_rollout_ref.rollout.n"
_KL_LOSS, _KL_REWARD = f"{ACTOR}.kl_loss_type", "algorithm.kl_penalty"
_STAGES = tuple(f"actor_rollout_ref.{role}.fsdp_config.pipeline_parallel_size" for role in ("actor", "ref"))

PER_TOKEN = ("gae", "optimal_token_baseline", "tir_optimal_token_baseline", "vtrace")
"""Estimators that give the tokens of a sequence different advantages."""

REWARDS_TO_GO = ("reinforce_plus_plus", "remax")
"""Those that do where a sequence is not rewarded at its end alone, or its rewards are discounted."""

ONE_ADVANTAGE = ("geo_mean",)
"""Losses that multiply the tokens' ratios, and weigh the product by one advantage."""

NO_RATIO = ("gpg", "reinforce")
"""Losses without the ratio of the present policy and the one that wrote the samples."""


def one_advantage_each(config: TrainConfig) -> Iterator[ConfigError]:
    algorithm, loss = config.algorithm, config.actor_rollout_ref.actor.policy_loss.loss_mode
    estimator = algorithm.adv_estimator
    steps = any(term.step_separator is not None for term in config.reward_model.scorers.values())
    within = algorithm.use_kl_in_reward or algorithm.gamma < 1 or steps
    to_go = estimator in REWARDS_TO_GO and within
    if loss in ONE_ADVANTAGE and (to_go or estimator in PER_TOKEN):
        why = ", with the KL in the reward, a discount or scores of steps," if to_go else ""
        yield ConfigError(
            f"it has one advantage for a whole sequence; {estimator}{why} gives each token its own",
            field=_LOSS,
            got=f"{loss} with {_ESTIMATOR}={estimator}",
            expected="an estimator that compares whole responses, such as grpo, rloo or "
            "reinforce_plus_plus_baseline",
            remedy=f"set {_ESTIMATOR}=grpo, or {_LOSS}=gspo, whose tokens may differ",
        )


def updates_of_a_batch(config: TrainConfig) -> Iterator[str]:
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


def aggregation(config: TrainConfig) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    loss, mode = actor.policy_loss.loss_mode, actor.loss_agg_mode
    if loss not in BY_SEQUENCE:
        return
    if mode not in (None, "seq-mean-token-mean"):
        yield (
            f"{ACTOR}.loss_agg_mode={mode}: {loss} as published has seq-mean-token-mean, where each sequence "
            "counts the same."
        )
    if mode is None and loss not in DEAF and config.trainer.defaults == "verl":
        yield (
            f"{ACTOR}.loss_agg_mode: {loss} has seq-mean-token-mean, as published, where verl has token-mean "
            "unless it is set; set token-mean for verl's."
        )


def weighted_once(config: TrainConfig) -> Iterator[ConfigError]:
    correction = config.algorithm.rollout_correction
    if config.algorithm.adv_estimator == "vtrace" and correction.rollout_is is not None:
        yield ConfigError(
            "the advantages of vtrace hold the importance weights already",
            field=f"{AT}.rollout_is",
            expected="null",
            remedy=f"remove it, or set {_ESTIMATOR}=gae",
        )


_MEANINGLESS_ALONE = {
    "rloo": "rloo leaves one sample of a prompt out, and there is only one",
    "grpo_passk": "grpo_passk compares the two best samples of a prompt, and there is only one",
}


def group_size(config: TrainConfig) -> Iterator[ConfigError | str]:
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    known = needs(estimator)
    if known is None or not known.group or n > 1:
        return
    if estimator in _MEANINGLESS_ALONE:
        yield ConfigError(
            _MEANINGLESS_ALONE[estimator],
            field=_N,
            expected=">= 2",
            remedy=f"set {_N}=4, or another algorithm.adv_estimator",
        )
    else:
        yield f"{_N}=1: {estimator} compares the samples of a prompt, and there is only one."


_NO_KL_IN_REWARD = {
    "gdpo": "gdpo reads the reward's components, and the KL is subtracted from their sum",
    "maxrl": "maxrl reads the mean reward as a rate of success, and with the KL it is none",
}


def kl_in_reward(config: TrainConfig) -> Iterator[ConfigError]:
    reason = _NO_KL_IN_REWARD.get(config.algorithm.adv_estimator)
    if reason is not None and config.algorithm.use_kl_in_reward:
        yield ConfigError(
            reason,
            field="algorithm.use_kl_in_reward",
            expected="false",
            remedy="set actor_rollout_ref.actor.use_kl_loss=true instead",
        )


def options(config: TrainConfig) -> Iterator[ConfigError]:
    """Options by name, for the estimator and the policy loss."""
    loss, known = config.actor_rollout_ref.actor.policy_loss, needs(config.algorithm.adv_estimator)
    own = {f"algorithm.{name}" for name in ADVANTAGE_KEYS}
    own |= {f"{ACTOR}.{name}" for name in LOSS_KEYS}
    for field, kwargs, options in (
        ("algorithm.adv_kwargs", config.algorithm.adv_kwargs, known and known.options),
        (f"{ACTOR}.policy_loss.kwargs", loss.kwargs, loss_options(loss.loss_mode)),
    ):
        section = "algorithm" if field.startswith("algorithm") else ACTOR
        free = [name for name in options or () if f"{section}.{name}" not in own]
        for name in kwargs:
            if f"{section}.{name}" in own:
                remedy = f"set {section}.{LOSS_KEYS.get(name, name)} instead"
                yield ConfigError(
                    "has a key of its own", field=f"{field}.{name}", got=kwargs[name], remedy=remedy
                )
            elif options is not None and name not in free:
                yield ConfigError(
                    "unknown option",
                    field=f"{field}.{name}",
                    got=kwargs[name],
                    expected="one of " + ", ".join(free) if free else "no options",
                    remedy=nearest_remedy(name, free),
                )


def bypass_loss(config: TrainConfig) -> Iterator[ConfigError]:
    """Bypass mode and its loss come together; the loss's type has one key."""
    bypasses = config.algorithm.rollout_correction.bypass_mode
    loss = config.actor_rollout_ref.actor.policy_loss
    if bypasses and loss.loss_mode not in (BYPASS, "vanilla"):
        yield ConfigError(
            f"another policy loss than that of {AT}.bypass_mode",
            field=f"{_OWN_LOSS}.loss_mode",
            expected=BYPASS,
            remedy=f"remove one of the two; {AT}.loss_type chooses between ppo_clip and reinforce",
        )
    if loss.loss_mode == BYPASS and not bypasses:
        yield ConfigError(
            "compares with the policy that sampled, and the old log-probs are those of training",
            field=f"{_OWN_LOSS}.loss_mode",
            remedy=f"set {AT}.bypass_mode=true, or another loss",
        )
    if loss.loss_mode == BYPASS and "loss_type" in loss.kwargs:
        yield ConfigError(
            "has a key of its own",
            field=f"{_OWN_LOSS}.kwargs.loss_type",
            got=loss.kwargs["loss_type"],
            remedy=f"set {AT}.loss_type instead",
        )


def bypassed_forward(config: TrainConfig) -> Iterator[ConfigError]:
    estimator = config.algorithm.adv_estimator
    if config.algorithm.rollout_correction.bypass_mode and estimator in READS_SQUARES:
        yield ConfigError(
            "reads what the policy's forward before its updates gives, and bypass mode leaves that out",
            field="algorithm.adv_estimator",
            got=f"{estimator} with {AT}.bypass_mode=true",
            remedy=f"set {AT}.bypass_mode=false, or algorithm.adv_estimator=grpo",
        )


def exact_kl(config: TrainConfig) -> Iterator[ConfigError]:
    """The last hidden states and the output head are one stage's alone."""
    if not config.exact_kl:
        return
    in_loss = config.actor_rollout_ref.actor.use_kl_loss and value_at(config, _KL_LOSS) == FULL_KL
    field = _KL_LOSS if in_loss else _KL_REWARD
    for stages in _STAGES:
        if value_at(config, stages) > 1:
            yield ConfigError(
                "the exact KL needs hidden states and output head of both policies on every rank, which a "
                "model in stages has in its last alone",
                field=stages,
                got=f"{value_at(config, stages)} with {field}={FULL_KL}",
                expected="1",
                remedy=f"set {stages}=1, or an estimator such as {field}=k3+",
            )
