"""The rules of `algorithm.rollout_correction`, and when its keys count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tandem.config.files import code_file
from tandem.config.rollout_correction import AT, RolloutCorrectionConfig
from tandem.config.root import TrainConfig
from tandem.config.rule import Rule
from tandem.config.tables import READS_SQUARES
from tandem.config.use import Use
from tandem.errors import ConfigError

_ACTOR = "actor_rollout_ref.actor"
_LOSS = f"{_ACTOR}.policy_loss"
BYPASS = "bypass_mode"
"""The policy loss of that mode."""


def _section(
    check: Callable[[RolloutCorrectionConfig], Iterator[ConfigError]], *keys: str
) -> Rule[TrainConfig]:
    return Rule(
        tuple(f"{AT}.{name}" for name in keys),
        lambda config, changed: check(config.algorithm.rollout_correction),
    )


def _weight_bounds(correction: RolloutCorrectionConfig) -> Iterator[ConfigError]:
    try:
        _ = correction.weight_bounds
    except ConfigError as error:
        yield error


def _rejection_bounds(correction: RolloutCorrectionConfig) -> Iterator[ConfigError]:
    if not correction.rollout_rs:
        return
    try:
        _ = correction.rejection_bounds
    except ConfigError as error:
        yield error


def _own_code(correction: RolloutCorrectionConfig) -> Iterator[ConfigError]:
    yield from code_file(f"{AT}.rollout_is", correction.rollout_is or "")
    for mode in correction.rollout_rs:
        yield from code_file(f"{AT}.rollout_rs", mode)


def _normalised(correction: RolloutCorrectionConfig) -> Iterator[ConfigError]:
    if correction.bypass_mode and correction.rollout_is_batch_normalize:
        yield ConfigError(
            "the mean over the batch is known before the update only with a forward, which bypass_mode saves",
            field=f"{AT}.rollout_is_batch_normalize",
            got="true",
            remedy="set it to false, or set bypass_mode=false",
        )


def _loss(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    """Bypass mode and its loss come together; the loss's type has one key."""
    bypasses = config.algorithm.rollout_correction.bypass_mode
    loss = config.actor_rollout_ref.actor.policy_loss
    if bypasses and loss.loss_mode not in (BYPASS, "vanilla"):
        yield ConfigError(
            f"another policy loss than that of {AT}.bypass_mode",
            field=f"{_LOSS}.loss_mode",
            got=loss.loss_mode,
            expected=BYPASS,
            remedy=f"remove one of the two; {AT}.loss_type chooses between ppo_clip and reinforce",
        )
    if loss.loss_mode == BYPASS and not bypasses:
        yield ConfigError(
            "compares with the policy that sampled, and the old log-probs are those of training",
            field=f"{_LOSS}.loss_mode",
            got=loss.loss_mode,
            remedy=f"set {AT}.bypass_mode=true, or another loss",
        )
    if loss.loss_mode == BYPASS and "loss_type" in loss.kwargs:
        yield ConfigError(
            "has a key of its own",
            field=f"{_LOSS}.kwargs.loss_type",
            got=loss.kwargs["loss_type"],
            remedy=f"set {AT}.loss_type instead",
        )


def _forward(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    estimator = config.algorithm.adv_estimator
    if config.algorithm.rollout_correction.bypass_mode and estimator in READS_SQUARES:
        yield ConfigError(
            "reads what the policy's forward before its updates gives, and bypass mode leaves that out",
            field="algorithm.adv_estimator",
            got=f"{estimator} with {AT}.bypass_mode=true",
            remedy=f"set {AT}.bypass_mode=false, or algorithm.adv_estimator=grpo",
        )


CORRECTION_RULES: list[Rule[TrainConfig]] = [
    _section(_weight_bounds, "rollout_is_threshold"),
    _section(_rejection_bounds, "rollout_rs", "rollout_rs_threshold"),
    _section(_own_code, "rollout_is", "rollout_rs"),
    _section(_normalised, "bypass_mode", "rollout_is_batch_normalize"),
    Rule((f"{AT}.bypass_mode", f"{_LOSS}.loss_mode"), _loss),
    Rule((f"{AT}.bypass_mode", "algorithm.adv_estimator"), _forward),
]


def takes_weights(config: TrainConfig) -> bool:
    """Whether importance weights are applied: a clipped ratio to the policy that sampled is one already."""
    correction = config.algorithm.rollout_correction
    return not correction.bypass_mode or correction.loss_type == "reinforce"


def _clips(config: TrainConfig) -> bool:
    """Whether the loss of bypass mode, if it is on, has a clip range."""
    correction = config.algorithm.rollout_correction
    return not correction.bypass_mode or correction.loss_type == "ppo_clip"


CORRECTION_ERRORS: list[Use[Any]] = [
    Use(
        (f"{AT}.rollout_is_threshold", f"{AT}.rollout_is_batch_normalize"),
        (f"{AT}.rollout_is",),
        lambda config: config.algorithm.rollout_correction.rollout_is is not None,
        f"with {AT}.rollout_is",
    ),
    Use(
        (f"{AT}.rollout_is",),
        (f"{AT}.bypass_mode", f"{AT}.loss_type"),
        takes_weights,
        f"with {AT}.bypass_mode=false or {AT}.loss_type=reinforce",
    ),
    Use(
        (f"{AT}.rollout_rs_threshold",),
        (f"{AT}.rollout_rs",),
        lambda config: bool(config.algorithm.rollout_correction.rollout_rs),
        f"with {AT}.rollout_rs",
    ),
    Use(
        (f"{AT}.loss_type",),
        (f"{AT}.bypass_mode",),
        lambda config: config.algorithm.rollout_correction.bypass_mode,
        f"with {AT}.bypass_mode=true",
    ),
    Use(
        tuple(f"{_ACTOR}.clip_ratio{side}" for side in ("", "_low", "_high", "_c")),
        (f"{AT}.bypass_mode", f"{AT}.loss_type"),
        _clips,
        f"with {AT}.loss_type=ppo_clip",
    ),
]
