"""The rules of the reference policy: its estimators, what an exact KL needs, when it is reset."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.files import own_code
from tandem.config.lora import reference_is_the_actor
from tandem.config.root import TrainConfig
from tandem.config.rule import Rule
from tandem.config.schema import value_at
from tandem.config.tables import FULL_KL
from tandem.errors import ConfigError

_LOSS, _REWARD = "actor_rollout_ref.actor.kl_loss_type", "algorithm.kl_penalty"
_USED = ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward")
_STAGES = tuple(f"actor_rollout_ref.{role}.fsdp_config.pipeline_parallel_size" for role in ("actor", "ref"))
_RESET, _RANK = "actor_rollout_ref.ref.reset_interval", "actor_rollout_ref.model.lora_rank"


def _exact(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    """The last hidden states and the output head are one stage's alone."""
    if not config.exact_kl:
        return
    in_loss = config.actor_rollout_ref.actor.use_kl_loss and value_at(config, _LOSS) == FULL_KL
    field = _LOSS if in_loss else _REWARD
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


def _reset(config: TrainConfig, changed: frozenset[str]) -> Iterator[ConfigError]:
    interval = config.actor_rollout_ref.ref.reset_interval
    if interval and config.needs_reference and reference_is_the_actor(config):
        yield ConfigError(
            "the reference is the base of the actor's adapters, and has no weights of its own to change",
            field=_RESET,
            got=f"{interval} with {_RANK}={config.actor_rollout_ref.model.lora_rank}",
            expected="0, or a reference on a pool of its own",
            remedy=f"set {_RESET}=0, or place ref on another of trainer.resource_pools than the actor",
        )


REFERENCE_RULES: list[Rule[TrainConfig]] = [
    own_code(_LOSS),
    own_code(_REWARD),
    Rule((_LOSS, _REWARD, *_USED, *_STAGES), _exact),
    Rule((_RESET, _RANK, *_USED, "trainer.resource_pools", "trainer.placement"), _reset),
]
