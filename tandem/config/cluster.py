"""The processes of a run: pools and their roles, addresses, ports, network interfaces and timeouts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, MinLen
from pydantic import BeforeValidator

from tandem.config.needs import Check
from tandem.config.section import AsTuple, LocalPath, Section, When, key

POOL = "global_pool"
"""The name of the only pool if the user names none."""

HELPER_POOLS = ("controller_pool", "reward_pool")
"""Pools that every run has in addition to the user's. Each has one process and no device."""

ROLES = ("actor", "rollout", "ref", "critic", "reward_model", "reward")
"""The names of all roles."""

PLACED_ROLES = ("actor_rollout", *ROLES)
"""The roles that a placement may name; actor_rollout means actor and rollout on one pool."""

CLASS_ROLES = (*PLACED_ROLES, "batch", "data")
"""The roles for which the user may set a worker class."""


def _without_nulls(value: Any) -> Any:
    """Remove entries whose value is null, so that an override can remove an entry that a file has set."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {name: entry for name, entry in value.items() if entry is not None}
    return value


ByName = BeforeValidator(_without_nulls)

Counts = Annotated[tuple[Annotated[int, Ge(1)], ...], AsTuple, MinLen(1)]
"""A list of integers: the number of processes on each machine."""


class TimeoutsConfig(Section):
    """The time limits of a run. When a time limit is exceeded, the run stops with a report.

    Attributes:
        start: Seconds until all processes of the pools have started and are connected. Loading the models is
            limited by call instead.
        call: Seconds that one call of a worker method, or loading its models, may take. Time spent waiting
            for the call's input is not included.
        answer: Seconds in which a process must answer a liveness check.
        collective: Seconds that one collective operation between processes may take.
        resources: Seconds until the cluster provides the nodes and devices that the pools need.
        stop: Seconds after which a process is killed if it has not exited by itself.
    """

    start: float = key(300, gt=0)
    call: float = key(7200, gt=0)
    answer: float = key(30, gt=0)
    collective: float = key(1800, gt=0)
    resources: float = key(60, gt=0)
    stop: float = key(10, gt=0)


_OURS = When(
    lambda own: own.address is None, "if {address}=null, so that Ray is started for this run", notice=True
)


def _is_no_address(own: Any, given: str | None) -> bool:
    return given not in (None, "auto") and ("://" in str(given) or not re.fullmatch(r"\S+:\d+", str(given)))


_ADDRESS = Check(
    _is_no_address,
    "this is not a valid address",
    expected="HOST:PORT of the head node, or auto on one of the cluster's machines",
    remedy="use the port of `ray start --head`, which is 6379 by default",
)


class ClusterConfig(Section):
    """The Ray cluster and its network.

    Attributes:
        address: The Ray cluster to use: HOST:PORT of its head node, or auto for the cluster that this machine
            belongs to. null: start Ray on this machine for this run.
        namespace: Ray namespace of the run's processes. null: a separate namespace for each run.
        interface: Network interface for collective operations, such as eth0. null: on each node, the
            interface that has the node's address.
        master_port: TCP port on the first node of a pool, which the processes of the pool use to find each
            other. The first pool with more than one process uses this port, and each further such pool uses
            the next port. 0: any free port.
        object_store_gb: Memory for Ray's object store, in GB (2^30 bytes), if Ray is started here. null: Ray
            chooses.
        temp_dir: Folder for Ray's sockets and logs, if Ray is started here. null: Ray chooses.
        ray_init: Additional arguments of ray.init, such as {num_cpus: 8, runtime_env: {env_vars: {A: b}}}.
    """

    address: str | None = key(None, needs=_ADDRESS)
    namespace: str | None = None
    interface: str | None = None
    master_port: int = key(0, ge=0, le=65535)
    object_store_gb: float | None = key(None, when=_OURS, gt=0)
    temp_dir: LocalPath | None = key(None, when=_OURS)
    ray_init: dict[str, Any] = key({})


def kind_of(role: str) -> str:
    """Return the role without its model's name: "ref" for "ref.NAME"."""
    return role.partition(".")[0]


def place(role: str, pools: Mapping[str, Any], placement: Mapping[str, str]) -> str | None:
    """Return the name of a role's pool; None for reward functions that have no placement.

    Such reward functions run in a helper pool.
    """
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
