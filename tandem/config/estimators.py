"""What an advantage estimator asks of the keys around it."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.root import TrainConfig
from tandem.config.rule import Rule
from tandem.config.tables import needs
from tandem.errors import ConfigError

_N = "actor_rollout_ref.rollout.n"

_MEANINGLESS_ALONE = {
    "rloo": "rloo leaves one sample of a prompt out, and there is only one",
    "grpo_passk": "grpo_passk compares the two best samples of a prompt, and there is only one",
}


def _group_size(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError | str]:
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    known = needs(estimator)
    if known is None or not known.group or n > 1:
        return
    if estimator in _MEANINGLESS_ALONE:
        yield ConfigError(
            _MEANINGLESS_ALONE[estimator],
            field=_N,
            got=n,
            expected=">= 2",
            remedy=f"set {_N}=4, or another algorithm.adv_estimator",
        )
    else:
        yield f"{_N}=1: {estimator} compares the samples of a prompt, and there is only one."


_NO_KL_IN_REWARD = {
    "gdpo": "gdpo reads the reward's components, and the KL is subtracted from their sum",
    "maxrl": "maxrl reads the mean reward as a rate of success, and with the KL it is none",
}


def _kl_in_reward(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    reason = _NO_KL_IN_REWARD.get(config.algorithm.adv_estimator)
    if reason is not None and config.algorithm.use_kl_in_reward:
        yield ConfigError(
            reason,
            field="algorithm.use_kl_in_reward",
            got="true",
            expected="false",
            remedy="set actor_rollout_ref.actor.use_kl_loss=true instead",
        )


ESTIMATOR_RULES: list[Rule[TrainConfig]] = [
    Rule(("algorithm.adv_estimator", _N), _group_size),
    Rule(("algorithm.adv_estimator", "algorithm.use_kl_in_reward"), _kl_in_reward),
]
