"""Rules about pools, the roles on them, and the workers that play the roles."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from tandem.config.cluster import CLASS_ROLES, HELPER_POOLS, PLACED_ROLES, ROLES
from tandem.config.model import SHARED_OUT, stored_config
from tandem.config.needs import code_file
from tandem.config.root import TrainConfig
from tandem.config.rules.rollout import splitting
from tandem.config.section import Finding, nearest_remedy
from tandem.config.supervised import SupervisedConfig
from tandem.config.trainer import TrainerConfig
from tandem.config.view import changed
from tandem.errors import ConfigError

POOLS, PLACEMENT, CLASSES = "trainer.resource_pools", "trainer.placement", "trainer.worker_classes"


def placement(config: TrainConfig) -> Iterator[ConfigError | str]:
    """Roles and pools by their names, each role once; then whether every pool has a role."""
    trainer = config.trainer
    switched_off = (f"reward_model.{name}" for name in config.reward_model.models)
    known = tuple(dict.fromkeys((*PLACED_ROLES, *config.roles, *switched_off)))
    errors = [*_reserved(trainer), *_roles(PLACEMENT, trainer.placement, known), *_pools(trainer)]
    errors += [*_twice(PLACEMENT, trainer.placement), *_half(trainer)]
    yield from errors or _empty_pools(trainer)
    yield from _absent(config, PLACEMENT, trainer.placement)


def worker_classes(config: TrainConfig) -> Iterator[ConfigError | str]:
    """Own workers: known roles, readable references, files that exist."""
    trainer = config.trainer
    given = trainer.worker_classes
    yield from _roles(CLASSES, given, CLASS_ROLES)
    yield from _twice(CLASSES, given)
    if "actor_rollout" in given and trainer.placed("actor") != trainer.placed("rollout"):
        yield ConfigError(
            "actor and rollout are placed apart, and are two workers",
            field=f"{CLASSES}.actor_rollout",
            got=given["actor_rollout"],
            remedy=f"set {CLASSES}.actor or {CLASSES}.rollout, or place both on one pool",
        )
    for role, reference in given.items():
        yield from code_file(f"{CLASSES}.{role}", reference)
        if not re.fullmatch(r".+:[^\W\d]\w*", reference):
            yield ConfigError(
                "not the name of a class",
                field=f"{CLASSES}.{role}",
                got=reference,
                expected="file.py:Class or package.module:Class",
            )
    yield from _absent(config, CLASSES, given)


def devices(config: TrainConfig) -> Iterator[ConfigError]:
    """Pools against the keys that say the same of one pool."""
    trainer = config.trainer
    asked = trainer.n_gpus_per_node * trainer.nnodes
    set_keys = [f"trainer.{name}" for name in ("n_gpus_per_node", "nnodes") if changed(trainer, name)]
    if trainer.resource_pools and set_keys and asked != trainer.world_size:
        yield ConfigError(
            f"disagrees with {POOLS}",
            field=set_keys[0],
            got=f"{trainer.n_gpus_per_node} per node × {trainer.nnodes} nodes = {asked}",
            expected=f"{trainer.world_size}, the devices of all pools together (reward functions have none)",
            remedy=f"remove {' and '.join(set_keys)}: {POOLS} says it all",
        )


def rollout_split(config: TrainConfig) -> Iterator[Finding]:
    """The devices that split the rollout engine's layers against the engine, its model and its pool."""
    policy, field = config.actor_rollout_ref, "actor_rollout_ref.rollout.tensor_model_parallel_size"
    if config.trainer.placed("rollout") not in config.trainer.pools:  # `placement` says so
        return
    rollout, devices = policy.rollout, config.trainer.devices_of("rollout")
    size = rollout.tensor_model_parallel_size
    refused = list(splitting(rollout, "actor_rollout_ref.rollout", engines=("native", "vllm")))
    uneven = _uneven(policy.model.path, size, copies_heads=rollout.name == "vllm")
    refused = refused or list(_divides(field, size, devices, remedy=f"set {field}=1", whose="rollout"))
    yield from refused
    if uneven and not refused:
        yield _unsplit(field, size, uneven, policy.model.path, "further devices take further samples")


def model_split(config: TrainConfig) -> Iterator[ConfigError]:
    """The devices that share a model's sequences and weights against its pool and its attention heads."""
    for role, at, section, path in _models(config):
        if config.trainer.placed(role) in config.trainer.pools:  # else `placement` says so
            yield from _model_split(f"{at}.", section, path, config.trainer.devices_of(role))


def _models(config: TrainConfig) -> Iterator[tuple[str, str, Any, str]]:
    """Role, path, section and folder of each model with an engine of its own."""
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    yield "actor", "actor_rollout_ref.actor", policy.actor, policy.model.path
    if config.needs_critic:
        yield "critic", "critic", critic, critic.model.path
    for role, scorer in reward.scorers.items():
        yield role, "reward_model", reward, scorer.path
    ref = policy.ref
    own = changed(ref, "ulysses_sequence_parallel_size") or any(
        changed(ref.fsdp_config, f"{part}_size") for part in ("fsdp", "tensor_parallel", "pipeline_parallel")
    )
    for role, term in ref.references.items() if config.needs_reference else ():
        apart = config.trainer.placed(role) != config.trainer.placed("actor")
        if apart or own or term.path:  # else the actor's are its own
            yield role, "actor_rollout_ref.ref", ref, term.path or policy.model.path


def supervised_split(config: SupervisedConfig) -> Iterator[ConfigError]:
    """The same of the only model of a supervised run."""
    trainer = config.trainer
    yield from _model_split("", config, config.model.path, trainer.n_gpus_per_node * trainer.nnodes)


def _model_split(at: str, section: Any, path: str, devices: int) -> Iterator[ConfigError]:
    """
    Args:
        at: what stands before the section's keys.
    """
    fsdp, sequence = section.fsdp_config, section.ulysses_sequence_parallel_size
    tensor, copies = fsdp.tensor_parallel_size, fsdp.fsdp_size
    by_layer, by_token = f"{at}fsdp_config.tensor_parallel_size", f"{at}ulysses_sequence_parallel_size"
    stages = fsdp.pipeline_parallel_size
    unstaged = list(_stages(f"{at}fsdp_config.pipeline_parallel_size", stages, path, devices))
    yield from unstaged
    devices = devices if unstaged else devices // stages
    wrong = list(_divides(by_layer, tensor, devices, remedy=f"set {by_layer}=1"))
    yield from wrong
    parts = devices if wrong else devices // tensor
    yield from _divides(by_token, sequence, parts, remedy=f"set {by_token}=1")
    field = f"{at}fsdp_config.fsdp_size"
    yield from _divides(field, parts if copies == -1 else copies, parts, remedy=f"set {field}=-1")
    heads = "num_attention_heads"
    uneven = _uneven(path, tensor)
    if uneven and not wrong:
        yield _unsplit(by_layer, tensor, uneven, path, "FSDP shards over all devices")
    count = _number(path, heads) or 0
    each = count // tensor
    if not count % tensor and each % sequence:
        yield ConfigError(
            "the model's attention heads cannot be shared out",
            field=by_token,
            got=f"{sequence} devices, {each} heads in {path}"
            + (f" for each of {tensor}" if tensor > 1 else ""),
            expected=f"a divisor of {each}",
        )


def _uneven(path: str, parts: int, *, copies_heads: bool = False) -> str:
    """The counts in a model's config that so many devices cannot share, in words; empty if there are none.

    Args:
        copies_heads: whether several devices may hold the same head of keys and values.
    """
    sizes = {name: count for name in SHARED_OUT if (count := _number(path, name)) is not None}
    if copies_heads and not parts % sizes.get("num_key_value_heads", 1):
        sizes.pop("num_key_value_heads", None)
    return ", ".join(f"{name} {count}" for name, count in sizes.items() if count % parts)


def _unsplit(field: str, size: int, uneven: str, path: str, else_: str) -> ConfigError:
    return ConfigError(
        "the model's layers cannot be split evenly",
        field=field,
        got=f"{size} devices, {uneven} in {path}",
        expected="a divisor of each",
        remedy=f"set {field}=1; {else_}",
    )


def _stages(field: str, stages: int, path: str, devices: int) -> Iterator[ConfigError]:
    uneven = list(_divides(field, stages, devices, remedy=f"set {field}=1"))
    yield from uneven
    layers = _number(path, "num_hidden_layers")
    if not uneven and layers is not None and stages > layers:
        yield ConfigError(
            "more stages than the model has layers",
            field=field,
            got=f"{stages} stages, num_hidden_layers {layers} in {path}",
            expected=f"at most {layers}",
            remedy=f"set {field}={layers} or less",
        )


def _divides(
    field: str, size: int, devices: int, *, remedy: str, whose: str = "model"
) -> Iterator[ConfigError]:
    if size < 1 or devices % size:
        yield ConfigError(
            f"the {whose}'s devices cannot be shared out in groups of this size",
            field=field,
            got=f"{size}, of {devices} devices",
            expected=f"a divisor of {devices}",
            remedy=f"{remedy}, or change the number of devices",
        )


def _number(path: str, name: str) -> int | None:
    """What the model folder's config says; None where it cannot be read, which other rules report."""
    found = stored_config(path)
    count = found.get("text_config", found).get(name)
    return count if isinstance(count, int) else None


def _roles(field: str, names: Iterable[str], known: tuple[str, ...]) -> Iterator[ConfigError]:
    yield from (_unknown("role", f"{field}.{name}", name, known) for name in names if name not in known)


def _pools(trainer: TrainerConfig) -> Iterator[ConfigError]:
    for role, name in trainer.placement.items():
        if name not in trainer.pools:
            add = f"add it: {POOLS}.{name}=[…]"
            yield _unknown("resource pool", f"{PLACEMENT}.{role}", name, trainer.pools, add)


def _unknown(
    what: str, field: str, name: str, known: Collection[str], remedy: str | None = None
) -> ConfigError:
    return ConfigError(
        f"unknown {what}",
        field=field,
        got=name,
        expected="one of " + ", ".join(known),
        remedy=nearest_remedy(name, known) or remedy,
    )


def _reserved(trainer: TrainerConfig) -> Iterator[ConfigError]:
    for name in trainer.resource_pools:
        if name in HELPER_POOLS:
            yield ConfigError(
                "the name of a pool that every run has",
                field=f"{POOLS}.{name}",
                remedy="give the pool another name",
            )


def _twice(field: str, names: Iterable[str]) -> Iterator[ConfigError]:
    for part in ("actor", "rollout"):
        if {"actor_rollout", part} <= set(names):
            yield ConfigError(
                f"actor_rollout, which stands for actor and rollout, is given together with {part}",
                field=f"{field}.{part}",
                remedy=f"remove {field}.{part}, or set actor and rollout in place of actor_rollout",
            )


def _half(trainer: TrainerConfig) -> Iterator[ConfigError]:
    given = {"actor", "rollout"} & set(trainer.placement)
    if len(given) == 1 and "actor_rollout" not in trainer.placement:
        (here,) = given
        (other,) = {"actor", "rollout"} - given
        yield ConfigError(
            f"given without {other}",
            field=f"{PLACEMENT}.{here}",
            got=trainer.placement[here],
            remedy=f"set {PLACEMENT}.{other} too; for both on one pool set {PLACEMENT}.actor_rollout",
        )


def _empty_pools(trainer: TrainerConfig) -> Iterator[ConfigError]:
    used = {trainer.placed(role) for role in (*ROLES, *trainer.placement)}
    for name, counts in trainer.pools.items():
        if name not in used:
            yield ConfigError(
                "a pool without a role",
                field=f"{POOLS}.{name}",
                got=list(counts),
                remedy=f"place a role on it: {PLACEMENT}.<role>={name}; or remove it",
            )


def _absent(config: TrainConfig, field: str, names: Iterable[str]) -> Iterator[str]:
    """Sentences for roles that exist but that this run does not have."""
    for name in names:
        if name in ROLES and name not in {role.partition(".")[0] for role in config.roles}:
            yield f"{field}.{name}: no effect; this run has no {_WORDS[name]}."


_WORDS = {
    "ref": "reference policy (no KL term asks for it)",
    "critic": "critic (algorithm.adv_estimator needs none)",
    "reward_model": "reward model (reward_model.enable=false)",
    "reward": "reward functions (reward_model.enable=true)",
}
