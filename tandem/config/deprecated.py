"""Keys of older and of other command lines. Each is accepted, with one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Deprecated:
    """An old key.

    Attributes:
        now: the key that replaces it.
        shared_by: the role over whose devices the old value counts, where the new one is per device.
    """

    now: str
    shared_by: str | None = None

    def __str__(self) -> str:
        return f"{self.now} = value / data-parallel size" if self.shared_by else self.now


@dataclass(frozen=True, slots=True)
class Settled:
    """A switch that exists elsewhere and is always on here.

    Attributes:
        why: what makes it so.
    """

    why: str

    def __str__(self) -> str:
        return f"always true here: {self.why}"


_POLICY = "actor_rollout_ref"
_CORRECTION = "algorithm.rollout_correction"
_SCORED = "reward_model.forward_micro_batch_size_per_gpu"
_OVERLONG = "reward_model.overlong_buffer"

_SHARED = {
    f"{_POLICY}.actor.ppo_micro_batch_size": "actor",
    f"{_POLICY}.ref.log_prob_micro_batch_size": "ref",
    f"{_POLICY}.rollout.log_prob_micro_batch_size": "actor",
    "critic.ppo_micro_batch_size": "critic",
    "critic.forward_micro_batch_size": "critic",
}
"""Keys of all devices of a role together, which have a twin per device."""

_BELOW = {
    (f"{_POLICY}.actor", "critic"): {"grad_clip": "optim.clip_grad"},
    (f"{_POLICY}.actor.optim", "critic.optim"): {"warmup_style": "lr_scheduler_type"},
    (f"{_POLICY}.actor", f"{_POLICY}.ref", "critic"): {"use_torch_compile": "fsdp_config.use_torch_compile"},
    (f"{_POLICY}.model", "critic.model"): {
        "lora.rank": "lora_rank",
        "lora.alpha": "lora_alpha",
        "lora.target_modules": "target_modules",
        "lora.exclude_modules": "exclude_modules",
        "override_config.attn_implementation": "attn_implementation",
    },
}
"""Sections, and the keys that have other names there now."""

_TILES = {
    "entropy_from_logits_with_chunking": "the head works through the vocabulary in tiles and never holds all "
    "logits at once",
    "entropy_checkpointing": "the backward pass makes the logits again, tile by tile, but where all of them "
    "are few",
}

DEPRECATED: dict[str, Deprecated | Settled] = {
    **{name: Deprecated(f"{name}_per_gpu", shared_by=role) for name, role in _SHARED.items()},
    "reward_model.micro_batch_size": Deprecated(_SCORED, shared_by="reward_model"),
    "reward_model.micro_batch_size_per_gpu": Deprecated(_SCORED),
    **{
        f"{at}.{old}": Deprecated(f"{at}.{new}")
        for sections, names in _BELOW.items()
        for at in sections
        for old, new in names.items()
    },
    "algorithm.rollout_is_level": Deprecated(f"{_CORRECTION}.rollout_is"),
    "algorithm.rollout_is_threshold": Deprecated(f"{_CORRECTION}.rollout_is_threshold"),
    f"{_CORRECTION}.bypass_old_logprob_for_rollout": Deprecated(f"{_CORRECTION}.bypass_mode"),
    f"{_POLICY}.rollout.calculate_log_probs": Settled("every engine gives the log-probs of what it samples"),
    **{
        f"reward_model.reward_kwargs.overlong_buffer_cfg.{name}": Deprecated(f"{_OVERLONG}.{name}")
        for name in ("enable", "len", "penalty_factor", "log")
    },
    "trainer.ray_wait_register_center_timeout": Deprecated("trainer.timeouts.start"),
    f"{_POLICY}.actor.calculate_sum_pi_squared": Settled(
        "it is computed where the advantage estimator reads it"
    ),
    **{f"{_POLICY}.{role}.{name}": Settled(why) for role in ("actor", "ref") for name, why in _TILES.items()},
}


def modernise(
    given: Mapping[str, Any],
    deprecated: Mapping[str, Deprecated | Settled],
    devices_of: Callable[[str], int],
) -> tuple[dict[str, Any], list[ConfigError], list[str]]:
    """The given values under today's keys, errors, and one notice for each old key.

    Args:
        given: values by dotted path.
        deprecated: the old keys.
        devices_of: the data-parallel size of a role.
    """
    new = {name: value for name, value in given.items() if name not in deprecated}
    errors: list[ConfigError] = []
    notices: list[str] = []
    for name, rule in deprecated.items():
        value = given.get(name)
        if value is None:
            continue
        if isinstance(rule, Settled):
            if isinstance(value, bool):
                notices.append(f"{name}={str(value).lower()}: {rule}.")
            else:
                errors.append(ConfigError("wrong type", field=name, got=value, expected="true or false"))
        elif new.get(rule.now) is not None:
            errors.append(
                ConfigError(f"given together with {rule.now}", field=name, got=value, remedy=f"remove {name}")
            )
        elif rule.shared_by is None:
            new[rule.now] = value
            notices.append(f"{name} is deprecated: use {rule.now}={value}.")
        elif type(value) is not int or value < 1 or value % (devices := devices_of(rule.shared_by)):
            errors.append(_unshared(name, value, rule.now, devices_of(rule.shared_by)))
        else:
            new[rule.now] = value // devices
            notices.append(
                f"{name} is deprecated: use {rule.now}={value // devices} "
                f"({value} over {devices} data-parallel device{'s' * (devices > 1)})."
            )
    return new, errors, notices


def _unshared(name: str, got: Any, now: str, devices: int) -> ConfigError:
    expected = "integer >= 1" if devices == 1 else f"a multiple of the {devices} devices"
    return ConfigError("cannot be shared out", field=name, got=got, expected=expected, remedy=f"use {now}")
