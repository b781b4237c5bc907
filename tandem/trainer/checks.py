"""Checks of a config that need no run folder, no data and no model: its algorithms are found and take the
options given, and the user is told of settings without effect on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tandem.algorithms.kl import FULL
from tandem.algorithms.registry import AdvantageSpec, advantage_estimator, kl_estimator, policy_loss
from tandem.config.root import TrainConfig
from tandem.config.section import Section
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
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    kinds = {algorithm.kl_penalty} if algorithm.use_kl_in_reward else set()
    kinds |= {actor.kl_loss_type} if actor.use_kl_loss else set()
    spec = advantage_estimator(algorithm.adv_estimator)
    several = config.actor_rollout_ref.ref.models
    if several and "ref_log_probs" in spec.columns:
        raise ConfigError(
            f"{spec.name} reads the log-probs of one reference, and there are several",
            field="actor_rollout_ref.ref.models",
            got=", ".join(several),
            remedy="remove it, or choose another algorithm.adv_estimator",
        )
    for field, changes in (
        ("algorithm.use_kl_in_reward", algorithm.use_kl_in_reward),
        ("reward_model.overlong_buffer.enable", config.reward_model.overlong_buffer.enable),
    ):
        if changes and "token_level_rewards" not in spec.columns:
            raise ConfigError(
                f"changes the rewards, which {spec.name} does not read",
                field=field,
                got="true",
                expected="false",
                remedy="return the penalty as a component of the reward, or choose another "
                "algorithm.adv_estimator",
            )
    spec.select_options({}, algorithm.adv_kwargs)  # refuses what does not fit
    policy_loss(actor.policy_loss.loss_mode).select_options({}, actor.policy_loss.kwargs)
    for kind in kinds - {FULL}:
        kl_estimator(kind.removesuffix("+"))
    Correction(algorithm.rollout_correction)
    return spec


def say_idle_offload(trainer: RunConfig, models: Mapping[str, Section], say: Callable[[str], None]) -> None:
    """Tells the user of a CPU that offload has nothing to move from, and activations stay where they are.

    Args:
        models: the sections of the models that run, by dotted path; empty at the root.

    Raises:
        ConfigError: the device is to be one of this machine, which has none of the kind.
    """
    if not on_cpu(trainer):
        return
    parts = {
        f"{at}.{part}".removeprefix("."): getattr(model, part)
        for part in ("fsdp_config", "optim", "model")
        for at, model in models.items()
        if hasattr(model, part)
    }
    offloads = ("param_offload", "optimizer_offload")
    idle = [f"{at}.{key}" for at, part in parts.items() for key in offloads if getattr(part, key, False)]
    on_host = [at for at, part in parts.items() if getattr(part, "optimizer", "") == "adamw_cpu"]
    idle += [f"{at}.optimizer=adamw_cpu" for at in on_host]
    if idle:
        say(f"{', '.join(idle)}: no effect on a CPU, whose memory is the host's.")
    for at, part in parts.items():
        if getattr(part, "enable_activation_offload", False):
            say(f"{at}.enable_activation_offload: on a CPU nothing moves; what would is counted.")


def models_of(config: TrainConfig, played: frozenset[str]) -> dict[str, Section]:
    """The sections of the models that this run has, by dotted path.

    Args:
        played: the roles that the run has.
    """
    policy = config.actor_rollout_ref
    sections: tuple[tuple[str, str, Section], ...] = (
        ("actor", "actor_rollout_ref", policy),
        ("actor", "actor_rollout_ref.actor", policy.actor),
        ("ref", "actor_rollout_ref.ref", policy.ref),
        ("critic", "critic", config.critic),
        ("reward_model", "reward_model", config.reward_model),
    )
    kinds = {role.partition(".")[0] for role in played}
    return {at: section for role, at, section in sections if role in kinds}


def on_cpu(trainer: RunConfig) -> bool:
    """Whether the workers compute on a CPU, as far as can be known here: under Ray they may be on machines
    that have a device which this one lacks."""
    if trainer.resolved_backend == "local":
        return choose_device(trainer.device).type == "cpu"
    return trainer.device == "cpu"
