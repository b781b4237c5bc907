"""The placing of roles: the class that plays each, its processes, and the roles it shares them with."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.algorithms.registry import AdvantageSpec
from tandem.config.cluster import place
from tandem.config.root import TrainConfig
from tandem.config.trainer import TrainerConfig
from tandem.errors import ConfigError
from tandem.loading import load_module
from tandem.runtime import Placement, ResourcePool, Role, Worker
from tandem.runtime.resource_pool import role_name
from tandem.runtime.worker import registrations
from tandem.trainer.methods import Need, needs_of, require_methods
from tandem.workers.actor import ActorWorker
from tandem.workers.batch import BatchWorker
from tandem.workers.critic import CriticWorker
from tandem.workers.data import DataWorker
from tandem.workers.reward import RewardWorker
from tandem.workers.reward_model import RewardModelWorker

CONTROLLER_POOL = ResourcePool([1], "controller_pool", on_device=False, beside_controller=True)
"""The process beside the controller that reads data and computes over whole batches."""
REWARD_POOL = ResourcePool([1], "reward_pool", on_device=False, beside_controller=True)
"""The process of reward functions, unless they are placed elsewhere."""

PLACES = {
    "actor": (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef),
    "rollout": (Role.Rollout, Role.ActorRollout, Role.ActorRolloutRef),
    "ref": (Role.RefPolicy, Role.ActorRolloutRef),
    "critic": (Role.Critic,),
    "reward_model": (Role.RewardModel,),
    "reward": (Role.Reward,),
}
"""The names in a placement by which each role may be placed, the most particular first."""


@dataclass(frozen=True)
class Tenant:
    """One group of workers.

    Attributes:
        role: its name.
        parts: the roles it plays.
        pool: its processes.
        worker: its class.
    """

    role: str
    parts: frozenset[str]
    pool: ResourcePool
    worker: type[Worker]


@dataclass(frozen=True)
class Cast:
    """The roles of a run, and the classes that play them.

    Attributes:
        played: the roles that the run has, of those of `PLACES`; one of several models as role.NAME.
        classes: worker classes of the user's own, by role; others are ours.
        needs: what the run calls on them.
    """

    played: frozenset[str]
    classes: Mapping[str, type[Worker]] = field(default_factory=dict)
    needs: tuple[Need, ...] = ()


def cast_roles(config: TrainConfig, spec: AdvantageSpec) -> Cast:
    """The cast of a run with this advantage estimator.

    Raises:
        ConfigError: a worker class of the user's own cannot be used.
    """
    classes = load_classes(config.trainer.worker_classes)
    return Cast(played_roles(config, spec), classes, needs_of(config, spec))


def played_roles(config: TrainConfig, spec: AdvantageSpec) -> frozenset[str]:
    """The roles of a run besides its helpers: references if a KL term or the estimator needs them, the critic
    if the estimator needs values, reward models, reward functions."""
    roles = {"actor", "rollout", *config.reward_model.scorers}
    if config.calls_functions:
        roles.add("reward")
    if config.needs_reference or "ref_log_probs" in spec.columns:
        roles |= config.actor_rollout_ref.ref.references.keys()
    if "values" in spec.columns:
        roles.add("critic")
    return frozenset(roles)


def configured_placement(trainer: TrainerConfig) -> Placement:
    """The placement that the config asks for."""
    placed = {places[0]: trainer.placed(role) for role, places in PLACES.items()}
    known: dict[Role | str, str] = {role: pool for role, pool in placed.items() if pool is not None}
    known |= {role: pool for role, pool in trainer.placement.items() if role != kind_of(role)}
    return Placement(trainer.pools, known)


def kind_of(role: str) -> str:
    """The role of which this is one of several, such as ref of ref.NAME; else the role itself."""
    return role.partition(".")[0]


def load_classes(references: Mapping[str, str]) -> dict[str, type[Worker]]:
    """The user's own worker classes by role.

    Args:
        references: role to `file.py:Class` or `package.module:Class`.

    Raises:
        ConfigError: no such module or class, or one that is no worker.
    """
    return {role: _load_class(role, reference) for role, reference in references.items()}


def _load_class(role: str, reference: str) -> type[Worker]:
    field = f"trainer.worker_classes.{role}"
    module, name = load_module(reference)
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, Worker):
        return found
    workers = [
        key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Worker)
    ]
    near = difflib.get_close_matches(name, workers, n=1)
    raise ConfigError(
        "no such worker class" if found is None else "not a worker class",
        field=field,
        got=reference,
        expected=f"a subclass of tandem.runtime.Worker; the module has {', '.join(workers) or 'none'}",
        remedy=f"did you mean '{near[0]}'?" if near else None,
    )


def tenants(placement: Placement, cast: Cast) -> dict[str, Tenant]:
    """The groups of a run by role. Actor, rollout and reference on one pool are one group, so that they
    share weights; a role with a class of the user's own is a group of its own. The helpers that read data and
    compute over whole batches are beside the controller.

    Args:
        placement: where the roles are.
        cast: which there are, and who plays them.

    Raises:
        ConfigError: a role without a place, or a class that lacks a method.
    """
    played, classes = cast.played, cast.classes
    pools = {role: _pool(placement, role) for role in played}
    apart = pools["actor"] != pools["rollout"] or bool({"actor", "rollout"} & set(classes))
    key = "actor" if apart else "actor_rollout"
    policy = classes.get(key, ActorWorker)
    parts = {"actor"} if apart else {"actor", "rollout"}
    if "ref" in played and pools["ref"] == pools["actor"] and "ref" not in classes:
        parts |= {"ref"} & _plays(policy)
    pools |= {"data": CONTROLLER_POOL, "batch": CONTROLLER_POOL}
    out = {"actor": Tenant("actor", frozenset(parts), pools["actor"], policy)}
    for role in ("data", *sorted(played - parts), "batch"):
        kind = kind_of(role)
        out[role] = Tenant(role, frozenset({role}), pools[role], classes.get(kind, _OURS[kind]))
    for role, tenant in out.items():
        named = key if role == "actor" else kind_of(role)
        require_methods(tenant.worker, tenant.parts, cast.needs, role=named, apart=apart)
    return out


def pools_of(placed: Mapping[str, Tenant]) -> dict[str, ResourcePool]:
    """The pools of a run by name, that of the controller's helpers first."""
    return {pool.name: pool for pool in (CONTROLLER_POOL, *(tenant.pool for tenant in placed.values()))}


def _plays(policy: type[Worker]) -> set[str]:
    return {"ref"} if "compute_ref_log_prob" in registrations(policy) else set()


def _pool(placement: Placement, role: str) -> ResourcePool:
    """The pool of a role: its own place, else the one that the config gives to roles without a place."""
    placed = {
        part: placement.mapping[name]
        for part, names in PLACES.items()
        for name in reversed(names)  # so that the most particular stays
        if name in placement.mapping
    }
    placed |= {name: pool for name, pool in placement.mapping.items() if isinstance(name, str)}
    if "actor" not in placed:
        raise ConfigError(
            "no resource pool is mapped to the actor",
            field="placement",
            got=", ".join(map(role_name, placement.mapping)) or "no role",
            expected="one of Actor, ActorRollout, ActorRolloutRef among the roles",
        )
    pool = place(role, placement.pools, placed)
    return REWARD_POOL if pool is None else placement.pools[pool]


_OURS: dict[str, type[Worker]] = {
    "data": DataWorker,
    "batch": BatchWorker,
    "rollout": ActorWorker,
    "ref": ActorWorker,
    "critic": CriticWorker,
    "reward_model": RewardModelWorker,
    "reward": RewardWorker,
}
