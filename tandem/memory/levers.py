"""The config changes that reduce the memory of a run that does not fit, and the bytes that each saves.

The gain of a change is the difference between two memory plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tandem.config.facts import Engine, engines
from tandem.config.root import TrainConfig
from tandem.config.schema import nested
from tandem.config.section import Section
from tandem.memory.plan import Plan


class Lever(NamedTuple):
    """A change of the config that saves memory.

    Attributes:
        words: the changes, as key=value.
        gain: bytes by which the peak memory of the run, or of a phase, decreases.
        fits: whether the run fits with this change.
    """

    words: tuple[str, ...]
    gain: float
    fits: bool


def levers(
    config: TrainConfig, replan: Callable[[TrainConfig], Plan], phase: str | None = None
) -> list[Lever]:
    """Return the levers that reduce the peak memory of a run, or of one phase.

    Levers with which the run fits are first. Within both groups, levers are sorted by gain. No lever changes
    the training results, except by rounding or by another optimizer.

    Args:
        config: the config.
        replan: a function that returns the memory plan of a config.
        phase: name of the phase; None: the whole run.
    """
    before = _needed(replan(config), phase)
    found = []
    for changes in _changes(config):
        after = replan(with_values(config, changes))
        gain = before - _needed(after, phase)
        if gain > before / 200:
            words = tuple(
                f"{key}={str(value).lower() if isinstance(value, bool) else value}"
                for key, value in changes.items()
            )
            found.append(Lever(words, gain, after.fits))
    return sorted(found, key=lambda lever: (not lever.fits, -lever.gain))


def _needed(made: Plan, phase: str | None) -> float:
    return max((each.needed for each in made.phases if each.name == phase), default=made.worst.needed)


def _changes(config: TrainConfig) -> Iterator[dict[str, Any]]:
    every = engines(config)
    for role in config.roles:
        if role in every:
            yield from _of_engine(config, role, every[role])
    for role in ("actor", "critic"):
        _, _, at, model = every[role]
        if role in config.roles:
            full = {f"{at}.enable_gradient_checkpointing": True, f"{at}.gradient_checkpointing_mode": "full"}
            yield full
            if not model.enable_activation_offload:
                yield {**full, f"{at}.enable_activation_offload": True}
    rollout = config.actor_rollout_ref.rollout
    at = "actor_rollout_ref.rollout"
    if rollout.name in ("vllm", "sglang"):
        yield {f"{at}.gpu_memory_utilization": round((rollout.gpu_memory_utilization or 0.5) * 0.7, 2)}
    if not rollout.free_cache_engine:
        yield {f"{at}.free_cache_engine": True}
    if rollout.log_prob_use_dynamic_bsz:
        yield {f"{at}.log_prob_max_token_len_per_gpu": rollout.log_prob_max_token_len_per_gpu // 2}


def _of_engine(config: TrainConfig, role: str, engine: Engine) -> Iterator[dict[str, Any]]:
    at, own = engine.at, engine.section
    fsdp = own.fsdp_config
    if not fsdp.param_offload:
        yield {f"{at}.fsdp_config.param_offload": True}
    devices = config.trainer.devices_of(role)
    if fsdp.tensor_parallel_size * 2 <= min(8, devices):
        yield {f"{at}.fsdp_config.tensor_parallel_size": fsdp.tensor_parallel_size * 2}
    if not hasattr(own, "optim"):
        return
    if not fsdp.optimizer_offload:
        yield {f"{at}.fsdp_config.optimizer_offload": True}
    if own.optim.optimizer == "adamw":
        yield {f"{at}.optim.optimizer": "adamw_8bit"}
        yield {f"{at}.optim.optimizer": "adamw_cpu"}
    if fsdp.gradient_sync != "each":
        yield {f"{at}.fsdp_config.gradient_sync": "each"}
    split = own.ulysses_sequence_parallel_size * 2
    if split * fsdp.tensor_parallel_size <= min(16, devices):
        yield {f"{at}.ulysses_sequence_parallel_size": split}
    longest = config.actor_rollout_ref.rollout.longest(config.data)
    if own.use_dynamic_bsz:
        fewer = max(own.ppo_max_token_len_per_gpu // 2, -(-longest // own.ulysses_sequence_parallel_size))
        yield {f"{at}.ppo_max_token_len_per_gpu": fewer}
    else:
        yield {f"{at}.ppo_micro_batch_size_per_gpu": max(1, (own.ppo_micro_batch_size_per_gpu or 2) // 2)}


def with_value(section: Any, key: str, value: Any) -> Any:
    """Return a copy of the section with another value at a dotted key, without validation."""
    return with_values(section, {key: value})


def with_values(section: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of the section with other values at dotted keys, without validation."""

    def changed(part: Section, tree: Mapping[str, Any]) -> Section:
        own = {name: getattr(part, name) for name in tree}
        within = [name for name in tree if isinstance(own[name], Section) and isinstance(tree[name], dict)]
        return part.model_copy(update={**tree, **{name: changed(own[name], tree[name]) for name in within}})

    return changed(section, nested(values))
