"""Rules about algorithms: which estimators, policy losses and KL terms can be combined."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tandem.config.needs import Check
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
from tandem.config.verl import IGNORES_AGGREGATION
from tandem.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
BYPASS = "bypass_mode"
"""The policy loss of bypass mode."""

_ESTIMATOR, _LOSS = "algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"
_N = "actor_rollout_ref.rollout.n"

PER_TOKEN = ("gae", "optimal_token_baseline", "tir_optimal_token_baseline", "vtrace")
"""Estimators that give the tokens of a sequence different advantages."""

REWARDS_TO_GO = ("reinforce_plus_plus", "remax")
"""Estimators that give different advantages only with rewards before the end or discounted rewards."""

ONE_ADVANTAGE = ("geo_mean",)
"""Losses that multiply the ratios of all tokens, and multiply this product by a single advantage."""

NO_RATIO = ("gpg", "reinforce")
"""Losses without the ratio of the current policy to the policy that generated the samples."""


def updates_of_a_batch(config: TrainConfig) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    loss = actor.policy_loss.loss_mode
    updates = actor.ppo_epochs * -(-config.data.train_batch_size // actor.ppo_mini_batch_size)
    if loss in NO_RATIO and updates > 1:
        yield (
            f"{_LOSS}={loss}: this loss has no ratio, so {updates - 1} of {updates} updates per batch treat "
            "samples of an older policy as samples of the current one. Set ppo_mini_batch_size to "
            "data.train_batch_size and ppo_epochs=1, or use a loss with a ratio."
        )
    if loss == "kl_cov" and updates == 1:
        yield (
            f"{_LOSS}=kl_cov: with one update per batch, its penalty is always zero. Set a smaller "
            "ppo_mini_batch_size, or more ppo_epochs."
        )


def options(config: TrainConfig) -> Iterator[ConfigError]:
    """Check that estimator and policy loss accept the options in `adv_kwargs` and `policy_loss.kwargs`."""
    loss, known = config.actor_rollout_ref.actor.policy_loss, needs(config.algorithm.adv_estimator)
    of_losses = {name: f"{ACTOR}.{key}" for name, key in LOSS_KEYS.items()}
    if loss.loss_mode == BYPASS:
        of_losses["loss_type"] = f"{AT}.loss_type"
    of_estimators = {name: f"algorithm.{name}" for name in ADVANTAGE_KEYS}
    for field, kwargs, options, own in (
        ("algorithm.adv_kwargs", config.algorithm.adv_kwargs, known and known.options, of_estimators),
        (f"{ACTOR}.policy_loss.kwargs", loss.kwargs, loss_options(loss.loss_mode), of_losses),
    ):
        free = [name for name in options or () if name not in own]
        for name, given in kwargs.items():
            at = f"{field}.{name}"
            if name in own:
                instead = f"set {own[name]} instead"
                yield ConfigError("this option has its own key", field=at, got=given, remedy=instead)
            elif options is not None and name not in free:
                expected = "one of " + ", ".join(free) if free else "no options"
                near = nearest_remedy(name, free)
                yield ConfigError("unknown option", field=at, got=given, expected=expected, remedy=near)


def exact_kl(config: TrainConfig) -> Iterator[ConfigError]:
    """Check that no model with an exact KL is split into pipeline stages.

    Only the last stage has the last hidden states and the output head.
    """
    field = f"{ACTOR}.kl_loss_type" if "loss" in config.exact_kl_terms else "algorithm.kl_penalty"
    for role in ("actor", "ref") if config.exact_kl else ():
        stages = f"actor_rollout_ref.{role}.fsdp_config.pipeline_parallel_size"
        if value_at(config, stages) > 1:
            yield ConfigError(
                "the exact KL needs the hidden states and the output head of both policies on every rank, "
                "but a model split into stages has them only in its last stage",
                field=stages,
                got=f"{value_at(config, stages)} with {field}={FULL_KL}",
                expected="1",
                remedy=f"set {stages}=1, or use an estimator such as {field}=k3+",
            )


def _rewarded_within(config: TrainConfig) -> bool:
    """Return whether a sequence has rewards before its end, or whether rewards are discounted."""
    steps = any(term.step_separator is not None for term in config.reward_model.scorers.values())
    return config.algorithm.use_kl_in_reward or config.algorithm.gamma < 1 or steps


def _one_advantage(tokens_differ: Callable[[TrainConfig], bool], why: str = "") -> Check:
    return Check(
        lambda config, loss: loss in ONE_ADVANTAGE and tokens_differ(config),
        f"this loss needs one advantage per sequence, but {{={_ESTIMATOR}}}{why} gives each token its own",
        field=_LOSS,
        got=f"{{=}} with {{{_ESTIMATOR}=}}",
        expected="an estimator that compares whole responses, such as grpo, rloo or "
        "reinforce_plus_plus_baseline",
        remedy=f"set {_ESTIMATOR}=grpo; or set {{}}=gspo, which accepts different advantages per token",
    )


def _compares_one(config: TrainConfig, n: int) -> bool:
    estimator = config.algorithm.adv_estimator
    known = needs(estimator)
    return n == 1 and known is not None and known.group and estimator not in ("rloo", "grpo_passk")


def _alone(estimator: str, why: str) -> Check:
    return Check(
        lambda config, n: n == 1 and config.algorithm.adv_estimator == estimator,
        f"{why}, and there is only one",
        field=_N,
        expected=">= 2",
        remedy=f"set {{}}=4, or use a different {_ESTIMATOR}",
    )


def _without_kl(estimator: str, why: str) -> Check:
    return Check(
        lambda config, used: used and config.algorithm.adv_estimator == estimator,
        why,
        field="algorithm.use_kl_in_reward",
        expected="false",
        remedy="set actor_rollout_ref.actor.use_kl_loss=true instead",
    )


PAIRS = (
    _one_advantage(lambda config: config.algorithm.adv_estimator in PER_TOKEN),
    _one_advantage(
        lambda config: config.algorithm.adv_estimator in REWARDS_TO_GO and _rewarded_within(config),
        ", with the KL in the reward, a discount or scores of single steps,",
    ),
    _alone("rloo", "rloo compares each sample with the other samples of its prompt"),
    _alone("grpo_passk", "grpo_passk compares the two best samples of a prompt"),
    Check(
        _compares_one,
        f"{{}}=1: {{={_ESTIMATOR}}} compares the samples of a prompt, and there is only one.",
        field=_N,
        notice=True,
    ),
    _without_kl("gdpo", "gdpo reads the components of the reward, but the KL is subtracted from their sum"),
    _without_kl("maxrl", "maxrl uses the mean reward as a success rate, which it is not with the KL"),
    Check(
        lambda config, weights: weights is not None and config.algorithm.adv_estimator == "vtrace",
        "the advantages of vtrace already contain the importance weights",
        field=f"{AT}.rollout_is",
        expected="null",
        remedy=f"remove this key, or set {_ESTIMATOR}=gae",
    ),
    Check(
        lambda config, loss: (
            loss in BY_SEQUENCE
            and config.actor_rollout_ref.actor.loss_agg_mode not in (None, "seq-mean-token-mean")
        ),
        f"{{{ACTOR}.loss_agg_mode=}}: {{=}} was published with seq-mean-token-mean, which gives each "
        "sequence the same weight.",
        field=_LOSS,
        notice=True,
    ),
    Check(
        lambda config, loss: (
            loss in BY_SEQUENCE
            and loss not in IGNORES_AGGREGATION
            and config.actor_rollout_ref.actor.loss_agg_mode is None
            and config.trainer.defaults == "verl"
        ),
        f"{{{ACTOR}.loss_agg_mode}}: the default for {{=}} is seq-mean-token-mean, as published; verl's "
        "default is token-mean. Set token-mean to do the same as verl.",
        field=_LOSS,
        notice=True,
    ),
    Check(
        lambda config, loss: (
            config.algorithm.rollout_correction.bypass_mode and loss not in (BYPASS, "vanilla")
        ),
        f"{AT}.bypass_mode=true requires its own policy loss",
        field=_LOSS,
        expected=BYPASS,
        remedy=f"remove one of the two keys; {AT}.loss_type selects ppo_clip or reinforce",
    ),
    Check(
        lambda config, loss: loss == BYPASS and not config.algorithm.rollout_correction.bypass_mode,
        "this loss needs the log-probs of the sampling policy, but the old log-probs are those of training",
        field=_LOSS,
        remedy=f"set {AT}.bypass_mode=true, or use a different loss",
    ),
    Check(
        lambda config, estimator: (
            config.algorithm.rollout_correction.bypass_mode and estimator in READS_SQUARES
        ),
        "this estimator needs a forward pass of the policy before its updates, which bypass mode skips",
        field=_ESTIMATOR,
        got=f"{{=}} with {AT}.bypass_mode=true",
        remedy=f"set {AT}.bypass_mode=false, or {{}}=grpo",
    ),
)
"""Combinations that are invalid or questionable."""
