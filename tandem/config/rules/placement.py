"""Rules about pools, the roles placed on them, and the worker classes of the roles."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from tandem.config.cluster import CLASS_ROLES, HELPER_POOLS, PLACED_ROLES, ROLES, kind_of
from tandem.config.facts import Model, models, size_of, type_of, uneven
from tandem.config.model import EXPERT_COUNTS, SPLIT_LAYERS, STAGED
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
    """Check that the placement's roles and pools exist, each role has one pool, and every pool has a role."""
    trainer = config.trainer
    switched_off = (f"reward_model.{name}" for name in config.reward_model.models)
    known = tuple(dict.fromkeys((*PLACED_ROLES, *config.roles, *switched_off)))
    errors = [
        ConfigError(
            "this is the name of a pool that every run already has",
            field=f"{POOLS}.{name}",
            remedy="give the pool another name",
        )
        for name in HELPER_POOLS
        if name in trainer.resource_pools
    ]
    errors += _roles(PLACEMENT, trainer.placement, known)
    for role, name in trainer.placement.items():
        if name not in trainer.pools:
            add = f"add it: {POOLS}.{name}=[…]"
            errors.append(_unknown("resource pool", f"{PLACEMENT}.{role}", name, trainer.pools, add))
    errors += [*_actor_and_rollout_twice(PLACEMENT, trainer.placement), *_half_placed(trainer)]
    yield from errors or _empty_pools(trainer)
    yield from _absent(config, PLACEMENT, trainer.placement)


def worker_classes(config: TrainConfig) -> Iterator[ConfigError | str]:
    """Check the user's worker classes: known roles, valid references, existing files."""
    trainer = config.trainer
    given = trainer.worker_classes
    yield from _roles(CLASSES, given, CLASS_ROLES)
    yield from _actor_and_rollout_twice(CLASSES, given)
    if "actor_rollout" in given and trainer.placed("actor") != trainer.placed("rollout"):
        yield ConfigError(
            "actor and rollout are placed in different pools, so they are two workers",
            field=f"{CLASSES}.actor_rollout",
            got=given["actor_rollout"],
            remedy=f"set {CLASSES}.actor or {CLASSES}.rollout, or place both on one pool",
        )
    for role, reference in given.items():
        yield from code_file(f"{CLASSES}.{role}", reference)
        if not re.fullmatch(r".+:[^\W\d]\w*", reference):
            yield ConfigError(
                "this is not a reference to a class",
                field=f"{CLASSES}.{role}",
                got=reference,
                expected="file.py:Class or package.module:Class",
            )
    yield from _absent(config, CLASSES, given)


def devices(config: TrainConfig) -> Iterator[ConfigError]:
    """Check that the pools agree with the keys that describe a single pool."""
    trainer = config.trainer
    asked = trainer.n_gpus_per_node * trainer.nnodes
    set_keys = [f"trainer.{name}" for name in ("n_gpus_per_node", "nnodes") if changed(trainer, name)]
    if trainer.resource_pools and set_keys and asked != trainer.world_size:
        yield ConfigError(
            f"this contradicts {POOLS}",
            field=set_keys[0],
            got=f"{trainer.n_gpus_per_node} per node × {trainer.nnodes} nodes = {asked}",
            expected=f"{trainer.world_size}, the devices of all pools together (reward functions use none)",
            remedy=f"remove {' and '.join(set_keys)}; {POOLS} is enough",
        )


def rollout_split(config: TrainConfig) -> Iterator[Finding]:
    """Check that the rollout engine can split its model's layers over the configured number of devices."""
    policy, field = config.actor_rollout_ref, "actor_rollout_ref.rollout.tensor_model_parallel_size"
    if config.trainer.placed("rollout") not in config.trainer.pools:  # `placement` reports it
        return
    rollout, folder = policy.rollout, policy.model.path
    size, key_heads = rollout.tensor_model_parallel_size, "num_key_value_heads"
    refused = list(splitting(rollout, engines=("native", "vllm", "sglang"))) or list(
        _divides(field, size, config.trainer.devices_of("rollout"), remedy=f"set {field}=1", whose="rollout")
    )
    yield from refused
    copied = rollout.name in ("vllm", "sglang") and not size % (size_of(folder, key_heads) or 1)
    parts = uneven(folder, size, leave_out=(key_heads,) if copied else ())
    if parts and not refused:
        yield _unsplit(field, size, parts, folder, "additional devices generate other samples")


def model_split(config: TrainConfig) -> Iterator[ConfigError]:
    """Check that each model's pool and attention heads are divisible by its `fsdp_config` split sizes."""
    trainer, ref = config.trainer, config.actor_rollout_ref.ref
    own = changed(ref, "ulysses_sequence_parallel_size") or any(
        changed(ref.fsdp_config, f"{part}_size")
        for part in ("fsdp", "tensor_parallel", "expert_parallel", "pipeline_parallel")
    )
    for model in models(config):
        pool = trainer.placed(model.role)
        actors = pool == trainer.placed("actor") and model.path == config.actor_rollout_ref.model.path
        if pool in trainer.pools and not (kind_of(model.role) == "ref" and actors and not own):
            yield from _model_split(model, trainer.devices_of(model.role))


def supervised_split(config: SupervisedConfig) -> Iterator[ConfigError]:
    """Check that a supervised run's processes and attention heads are divisible by the split sizes."""
    for model in models(config):
        yield from _model_split(model, config.trainer.n_gpus_per_node * config.trainer.nnodes)


def _model_split(model: Model, devices: int) -> Iterator[ConfigError]:
    engine, path = model.engine, model.path
    fsdp, sequence = engine.section.fsdp_config, engine.section.ulysses_sequence_parallel_size
    tensor, copies, stages = fsdp.tensor_parallel_size, fsdp.fsdp_size, fsdp.pipeline_parallel_size
    by_layer, by_expert, by_stage, by_copy = (
        engine.key(f"fsdp_config.{name}_size")
        for name in ("tensor_parallel", "expert_parallel", "pipeline_parallel", "fsdp")
    )
    by_token = engine.key("ulysses_sequence_parallel_size")
    yield from _kinds(path, {by_layer: (tensor, SPLIT_LAYERS), by_stage: (stages, STAGED)})
    unstaged = list(_stages(by_stage, stages, path, devices))
    yield from unstaged
    devices = devices if unstaged else devices // stages
    wrong = list(_divides(by_layer, tensor, devices, remedy=f"set {by_layer}=1"))
    yield from wrong
    parts = devices if wrong else devices // tensor
    yield from _divides(by_token, sequence, parts, remedy=f"set {by_token}=1")
    shards = parts if copies == -1 else copies
    yield from _divides(by_copy, shards, parts, remedy=f"set {by_copy}=-1")
    yield from _experts(by_expert, fsdp.expert_parallel_size, path, shards)
    shared = uneven(path, tensor)
    if shared and not wrong:
        yield _unsplit(by_layer, tensor, shared, path, "FSDP shards over all devices")
    count = size_of(path, "num_attention_heads") or 0
    each = count // tensor
    if not count % tensor and each % sequence:
        yield ConfigError(
            "the model's attention heads cannot be divided evenly",
            field=by_token,
            got=f"{sequence} devices, {each} heads in {path}"
            + (f" for each of {tensor}" if tensor > 1 else ""),
            expected=f"a divisor of {each}",
        )


def _kinds(path: str, sizes: dict[str, tuple[int, tuple[str, ...]]]) -> Iterator[ConfigError]:
    """Check that a model's architecture can be divided, by key: the size and the known model types."""
    kind = type_of(path)
    for field, (size, known) in sizes.items():
        if size > 1 and kind is not None and kind not in known:
            yield ConfigError(
                "a model of this architecture cannot be divided in this way",
                field=field,
                got=f"{size}, model_type {kind} in {path}",
                expected=f"1, or a model of type {', '.join(known)}",
                remedy=f"set {field}=1; FSDP shards any model",
            )


def _unsplit(field: str, size: int, uneven: str, path: str, else_: str) -> ConfigError:
    return ConfigError(
        "the model's layers cannot be split evenly",
        field=field,
        got=f"{size} devices, {uneven} in {path}",
        expected="a divisor of each",
        remedy=f"set {field}=1; {else_}",
    )


def _experts(field: str, size: int, path: str, shards: int) -> Iterator[ConfigError]:
    refused = list(_divides(field, size, shards, remedy=f"set {field}=1"))
    yield from refused
    if refused or size == 1 or type_of(path) is None:
        return
    counts = {name: count for name in EXPERT_COUNTS if (count := size_of(path, name))}
    uneven = [f"{name} {count}" for name, count in counts.items() if count % size]
    if uneven or not counts:
        yield ConfigError(
            "the model's experts cannot be divided evenly",
            field=field,
            got=f"{size} devices, {', '.join(uneven) or 'no experts'} in {path}",
            expected="a divisor of the number of experts" if counts else "1, or a model with experts",
            remedy=f"set {field}=1; FSDP shards over all devices",
        )


def _stages(field: str, stages: int, path: str, devices: int) -> Iterator[ConfigError]:
    refused = list(_divides(field, stages, devices, remedy=f"set {field}=1"))
    yield from refused
    layers = size_of(path, "num_hidden_layers")
    if not refused and layers is not None and stages > layers:
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
            f"the devices of the {whose} cannot be divided into groups of this size",
            field=field,
            got=f"{size}, with {devices} devices",
            expected=f"a divisor of {devices}",
            remedy=f"{remedy}, or change the number of devices",
        )


def _roles(field: str, names: Iterable[str], known: tuple[str, ...]) -> Iterator[ConfigError]:
    yield from (_unknown("role", f"{field}.{name}", name, known) for name in names if name not in known)


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


def _actor_and_rollout_twice(field: str, names: Iterable[str]) -> Iterator[ConfigError]:
    for part in ("actor", "rollout"):
        if {"actor_rollout", part} <= set(names):
            yield ConfigError(
                f"actor_rollout means actor and rollout, so it cannot be combined with {part}",
                field=f"{field}.{part}",
                remedy=f"remove {field}.{part}, or set actor and rollout instead of actor_rollout",
            )


def _half_placed(trainer: TrainerConfig) -> Iterator[ConfigError]:
    given = {"actor", "rollout"} & set(trainer.placement)
    if len(given) == 1 and "actor_rollout" not in trainer.placement:
        (here,) = given
        (other,) = {"actor", "rollout"} - given
        yield ConfigError(
            f"set without {other}",
            field=f"{PLACEMENT}.{here}",
            got=trainer.placement[here],
            remedy=f"set {PLACEMENT}.{other} too; or set {PLACEMENT}.actor_rollout to place both on one pool",
        )


def _empty_pools(trainer: TrainerConfig) -> Iterator[ConfigError]:
    used = {trainer.placed(role) for role in (*ROLES, *trainer.placement)}
    for name, counts in trainer.pools.items():
        if name not in used:
            yield ConfigError(
                "no role is placed on this pool",
                field=f"{POOLS}.{name}",
                got=list(counts),
                remedy=f"place a role on it with {PLACEMENT}.<role>={name}, or remove the pool",
            )


def _absent(config: TrainConfig, field: str, names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each role that exists but that this run does not have."""
    for name in names:
        if name in ROLES and name not in map(kind_of, config.roles):
            yield f"{field}.{name}: no effect; this run has no {_WORDS[name]}."


_WORDS = {
    "ref": "reference policy (no KL term needs it)",
    "critic": "critic (algorithm.adv_estimator does not need it)",
    "reward_model": "reward model (reward_model.enable=false)",
    "reward": "reward functions (reward_model.enable=true)",
}
