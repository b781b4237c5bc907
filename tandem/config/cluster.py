"""Places of a run's processes: pools and the roles on them; addresses, ports, interfaces and timeouts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, MinLen
from pydantic import BeforeValidator

from tandem.config.needs import Check
from tandem.config.section import AsTuple, LocalPath, Section, When, key

POOL = "global_pool"
"""The pool of all roles where nobody names pools."""

HELPER_POOLS = ("controller_pool", "reward_pool")
"""Pools that every run has besides the user's: one process each, without a device."""

ROLES = ("actor", "rollout", "ref", "critic", "reward_model", "reward")
"""Every role by its own name."""

PLACED_ROLES = ("actor_rollout", *ROLES)
"""What a placement may name; actor_rollout stands for actor and rollout on one pool."""

CLASS_ROLES = (*PLACED_ROLES, "batch", "data")
"""What may have a worker class of the user's own."""


def _without_nulls(value: Any) -> Any:
    """An entry that is null counts as not given, so that an override can take one of the file's back."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {name: entry for name, entry in value.items() if entry is not None}
    return value


ByName = BeforeValidator(_without_nulls)

Counts = Annotated[tuple[Annotated[int, Ge(1)], ...], AsTuple, MinLen(1)]
"""Processes per machine: one whole number for each."""


class TimeoutsConfig(Section):
    """The longest waits. Where one ends the run stops with a report, whatever it waited for.

    Attributes:
        start: seconds until all processes of the pools are up and connected; loading models is limited by
            call
        call: seconds that one method of a worker, or loading its models, may take; waiting for its input not
            counted
        answer: seconds a process may leave a sign of life unanswered
        collective: seconds of one collective operation between processes
        resources: seconds until the cluster has the nodes and devices that the pools ask for
        stop: seconds a process has to end by itself before it is killed
    """

    start: float = key(300, gt=0)
    call: float = key(7200, gt=0)
    answer: float = key(30, gt=0)
    collective: float = key(1800, gt=0)
    resources: float = key(60, gt=0)
    stop: float = key(10, gt=0)


_OURS = When(
    lambda own: own.address is None, "with {address}=null, where Ray is started for the run", notice=True
)


def _is_no_address(own: Any, given: str | None) -> bool:
    return given not in (None, "auto") and ("://" in str(given) or not re.fullmatch(r"\S+:\d+", str(given)))


_ADDRESS = Check(
    _is_no_address,
    "not an address",
    expected="HOST:PORT of the head node, or auto on one of the cluster's machines",
    remedy="the port is that of `ray start --head`, 6379 unless it was given another",
)


class ClusterConfig(Section):
    """The Ray cluster and its network.

    Attributes:
        address: the cluster: HOST:PORT of its head, or auto: the one this machine is in; null: start Ray
            here, for this run
        namespace: Ray namespace of the run's processes; null: one of its own
        interface: network interface of the collectives, such as eth0; null: on each node the one with its
            address
        master_port: TCP port at which the processes of a pool meet, on its first node: of the first pool with
            more than one process; each further such pool takes the next port; 0: any that is free
        object_store_gb: memory of Ray's object store, GB (2^30 bytes), where Ray is started here; null: Ray's
            own choice
        temp_dir: folder of Ray's sockets and logs, where Ray is started here; null: Ray's own choice
        ray_init: further arguments of ray.init, such as {num_cpus: 8, runtime_env: {env_vars: {A: b}}}
    """

    address: str | None = key(None, needs=_ADDRESS)
    namespace: str | None = None
    interface: str | None = None
    master_port: int = key(0, ge=0, le=65535)
    object_store_gb: float | None = key(None, when=_OURS, gt=0)
    temp_dir: LocalPath | None = key(None, when=_OURS)
    ray_init: dict[str, Any] = key({})


def kind_of(role: str) -> str:
    """Return the role of which this is one of several, such as ref of ref.NAME; else the role itself."""
    return role.partition(".")[0]


def place(role: str, pools: Mapping[str, Any], placement: Mapping[str, str]) -> str | None:
    """The name of a role's pool; None for reward functions without a place, which have a helper pool."""
    if role in placement:
        return placement[role]
    if role in ("actor", "rollout") and "actor_rollout" in placement:
        return placement["actor_rollout"]
    if kind_of(role) != role:
        return place(kind_of(role), pools, placement)
    if role == "reward":
        return None
    if role in ("actor", "actor_rollout"):
        return placement.get("actor", next(iter(pools)))
    return place("actor", pools, placement)
