"""Checks of a config that need no run folder, no data and no model: its algorithms are found and take the
options given, and the user is told of settings without effect on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tandem.algorithms.kl import FULL
from tandem.algorithms.registry import AdvantageSpec, advantage_estimator, kl_estimator, policy_loss
from tandem.config.fsdp import FSDPConfig
from tandem.config.optim import OptimConfig
from tandem.config.root import TrainConfig
from tandem.config.trainer import RunConfig
from tandem.device import choose_device
from tandem.errors import ConfigError
from tandem.workers.correction import Correction


def check_algorithms(config: TrainConfig) -> AdvantageSpec:
    """The advantage estimator, once all algorithms that the config names were found to be there and to take
    the options given.

    Raises:
        ConfigError: one is not, or does not.
    """
    spec = advantage_estimator(config.algorithm.adv_estimator)
    own_loss, kinds = config.actor_rollout_ref.actor.policy_loss, _kl_kinds(config)
    spec.select_options({}, config.algorithm.adv_kwargs)  # refuses what does not fit
    policy_loss(own_loss.loss_mode).select_options({}, own_loss.kwargs)
    for kind in kinds - {FULL}:
        kl_estimator(kind.removesuffix("+"))
    _check_rewards(config, spec)
    Correction.from_config(config.algorithm.rollout_correction)
    return spec


def _check_rewards(config: TrainConfig, spec: AdvantageSpec) -> None:
    """
    Raises:
        ConfigError: the reward is to be changed, and the estimator does not read it.
    """
    if "token_level_rewards" in spec.columns:
        return
    for field, changes in (
        ("algorithm.use_kl_in_reward", config.algorithm.use_kl_in_reward),
        ("reward_model.overlong_buffer.enable", config.reward_model.overlong_buffer.enable),
    ):
        if changes:
            raise ConfigError(
                f"changes the rewards, which {spec.name} does not read",
                field=field,
                got="true",
                expected="false",
                remedy="return the penalty as a component of the reward, or choose another "
                "algorithm.adv_estimator",
            )


def _kl_kinds(config: TrainConfig) -> set[str]:
    """The KL estimators that the run uses."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    in_reward = {algorithm.kl_penalty} if algorithm.use_kl_in_reward else set()
    return in_reward | ({actor.kl_loss_type} if actor.use_kl_loss else set())


def on_cpu(trainer: RunConfig) -> bool:
    """Whether the workers compute on a CPU, as far as can be known here: under Ray they may be on machines
    that have a device which this one lacks.

    Raises:
        ConfigError: the device is to be one of this machine, which has none of the kind.
    """
    if trainer.resolved_backend == "local":
        return choose_device(trainer.device).type == "cpu"
    return trainer.device == "cpu"


def say_idle_offload(config: TrainConfig, played: frozenset[str], say: Callable[[str], None]) -> None:
    """Tells the user of a CPU which offload of a config does nothing there.

    Args:
        played: the roles that the run has.
    """
    say_unused_offload(_sharded(config, played), _optimizers(config, played), say)
    _say_counted_offload(config, played, say)


def say_unused_offload(
    configs: Mapping[str, FSDPConfig],
    optimizers: Mapping[str, OptimConfig],
    say: Callable[[str], None],
) -> None:
    """Tells the user of a CPU that offload has nothing to move from.

    Args:
        configs: the sections of the models that run, by dotted path.
        optimizers: of those that learn.
    """
    names = [
        f"{at}.{part}"
        for at, config in configs.items()
        for part in ("param_offload", "optimizer_offload")
        if getattr(config, part)
    ]
    names += [f"{at}.optimizer=adamw_cpu" for at, o in optimizers.items() if o.optimizer == "adamw_cpu"]
    if names:
        say(f"{', '.join(names)}: no effect on a CPU, whose memory is the host's.")


def _say_counted_offload(config: TrainConfig, played: frozenset[str], say: Callable[[str], None]) -> None:
    """Tells the user of a CPU that activations stay where they are."""
    models = {
        "actor": ("actor_rollout_ref.model", config.actor_rollout_ref.model),
        "critic": ("critic.model", config.critic.model),
    }
    for role, (at, model) in models.items():
        if role in played and model.enable_activation_offload:
            say(f"{at}.enable_activation_offload: on a CPU nothing moves; what would is counted.")


def _sharded(config: TrainConfig, played: frozenset[str]) -> dict[str, FSDPConfig]:
    """The sections of the models that this run has."""
    policy = config.actor_rollout_ref
    sections = {
        "actor": ("actor_rollout_ref.actor", policy.actor.fsdp_config),
        "ref": ("actor_rollout_ref.ref", policy.ref.fsdp_config),
        "critic": ("critic", config.critic.fsdp_config),
        "reward_model": ("reward_model", config.reward_model.fsdp_config),
    }
    return {f"{at}.fsdp_config": section for role, (at, section) in sections.items() if role in played}


def _optimizers(config: TrainConfig, played: frozenset[str]) -> dict[str, OptimConfig]:
    """The sections of the models that learn."""
    sections = {
        "actor": ("actor_rollout_ref.actor.optim", config.actor_rollout_ref.actor.optim),
        "critic": ("critic.optim", config.critic.optim),
    }
    return {at: section for role, (at, section) in sections.items() if role in played}
