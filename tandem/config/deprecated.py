"""Keys of older command lines. Each works, with one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Deprecated:
    """An old key.

    Attributes:
        now: the key that replaces it.
        per_device: whether the old value counts over all devices, the new one per device.
    """

    now: str
    per_device: bool = False

    def __str__(self) -> str:
        return f"{self.now} = value / data-parallel size" if self.per_device else self.now


_POLICY = "actor_rollout_ref"

DEPRECATED = {
    **{
        name: Deprecated(f"{name}_per_gpu", per_device=True)
        for name in (
            f"{_POLICY}.actor.ppo_micro_batch_size",
            f"{_POLICY}.ref.log_prob_micro_batch_size",
            f"{_POLICY}.rollout.log_prob_micro_batch_size",
            "critic.ppo_micro_batch_size",
            "critic.forward_micro_batch_size",
        )
    },
    f"{_POLICY}.actor.grad_clip": Deprecated(f"{_POLICY}.actor.optim.clip_grad"),
    "critic.grad_clip": Deprecated("critic.optim.clip_grad"),
}


def modernise(
    given: Mapping[str, Any], deprecated: Mapping[str, Deprecated], devices: int
) -> tuple[dict[str, Any], list[ConfigError], list[str]]:
    """The given values under today's keys, errors, and one notice for each old key.

    Args:
        given: values by dotted path.
        deprecated: the old keys.
        devices: data-parallel size.
    """
    new = {name: value for name, value in given.items() if name not in deprecated}
    errors: list[ConfigError] = []
    notices: list[str] = []
    for name, rule in deprecated.items():
        value = given.get(name)
        if value is None:
            continue
        if new.get(rule.now) is not None:
            errors.append(
                ConfigError(f"given together with {rule.now}", field=name, got=value, remedy=f"remove {name}")
            )
            continue
        if not rule.per_device:
            new[rule.now] = value
            notices.append(f"{name} is deprecated: use {rule.now}={value}.")
        elif type(value) is not int or value < 1 or value % devices:
            expected = "integer >= 1" if devices == 1 else f"a multiple of the {devices} devices"
            errors.append(
                ConfigError(
                    "cannot be shared out", field=name, got=value, expected=expected, remedy=f"use {rule.now}"
                )
            )
        else:
            new[rule.now] = value // devices
            notices.append(
                f"{name} is deprecated: use {rule.now}={value // devices} "
                f"({value} over {devices} data-parallel device{'s' * (devices > 1)})."
            )
    return new, errors, notices
