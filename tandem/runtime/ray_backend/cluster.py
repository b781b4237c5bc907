"""The Ray cluster of a run: join or start it, reserve resources, and read the stacks of its processes."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tandem.errors import ConfigError, WorkerFailure
from tandem.lifetime import children_of, kill_trees, last_words
from tandem.runtime.resource_pool import ResourcePool

PROCESS = "tandem_process"
"""The resource that each process reserves in a Ray cluster that was started only for this run.

Such a cluster does not count cores, because the user may want more processes than cores.
"""

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}


def connect(
    address: str | None,
    *,
    temp_dir: str | None = None,
    object_store_gb: float | None = None,
    ray_init: Mapping[str, Any] | None = None,
) -> bool:
    """Join a cluster, or start Ray on this machine.

    If this process has already joined a cluster, it stays in this cluster.

    Args:
        address: The address of the cluster; "auto": the cluster of this machine; None: a new cluster, which
            ends with this process.
        temp_dir: The temporary folder of a Ray that is started here.
        object_store_gb: The size in GiB of the object store of a Ray that is started here.
        ray_init: More arguments of `ray.init`.

    Returns:
        Whether Ray was started or joined here.

    Raises:
        ConfigError: There is no cluster at the address, or Ray rejects the arguments.
        WorkerFailure: Ray did not start within its time limit.
    """
    if ray.is_initialized():
        return False
    # Ray logs that it checks a token that it made itself. The user need not act on this.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # the watch reports them
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    hook = os.environ.get("PYTHONBREAKPOINT")
    shared = _QUIET | dict(ray_init or {})
    try:
        if address is None:
            _start(temp_dir, object_store_gb, shared)
        else:
            _join(address, shared)
        return True
    finally:
        # Ray sets its own debugger there, but `breakpoint()` in the controller belongs to the user.
        if hook is None:
            os.environ.pop("PYTHONBREAKPOINT", None)
        else:
            os.environ["PYTHONBREAKPOINT"] = hook


def _join(address: str, shared: Mapping[str, Any]) -> None:
    try:
        ray.init(address=address, **shared)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            "there is no Ray cluster at this address",
            field="trainer.cluster.address",
            got=f"{address}: {str(error).splitlines()[0]}",
            expected="HOST:PORT of the head node, or auto on one of the cluster's machines",
            remedy="start it (tandem node, or ray start --head), or set trainer.cluster.address=null",
        ) from error


def _start(temp_dir: str | None, object_store_gb: float | None, shared: Mapping[str, Any]) -> None:
    store = None if object_store_gb is None else int(object_store_gb * 2**30)
    before = set(children_of(os.getpid()))
    try:
        ray.init(
            **{
                "address": "local",  # without this, Ray would look for a cluster to join
                "resources": {PROCESS: 10**6},
                "include_dashboard": False,
                "object_store_memory": store,
                "_temp_dir": temp_dir,
                "_system_config": {"prestart_worker_first_driver": False},
                **shared,
            }
        )
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"Ray does not accept these arguments: {str(error).splitlines()[0]}",
            field="trainer.cluster.ray_init",
            got=str({name: shared[name] for name in shared if name not in _QUIET}),
            expected="arguments of ray.init",
        ) from error
    except Exception as error:
        if type(error) is not Exception:
            raise
        ray.shutdown()
        raise WorkerFailure(
            f"Ray did not start on this machine: {error}\n"
            "  Ray waits 30 s for its own processes, which may be too short while the machine is busy. "
            "Start the run again later, or set trainer.max_restarts to let the run restart itself",
            restartable=True,
        ) from error

    # If this process ends without shutting Ray down, Ray's processes notice it only after a while.
    last_words.append(partial(_kill, set(children_of(os.getpid())) - before))


def _kill(started: set[int]) -> None:
    """Kill the processes that Ray started here.

    Only current child processes are killed, because the id of an ended process may now belong to another
    process.
    """
    kill_trees(started & set(children_of(os.getpid())))


def stacks(processes: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the stacks of each process of a run that another process controls.

    Args:
        processes: The content of the run's file that lists its processes; see `RayBackend`.

    Raises:
        ConfigError: The cluster of the run cannot be reached.
    """
    connect(processes["address"])
    try:
        for process in processes["processes"]:
            name = f"{process['name']} (node {process['node']}, pid {process['pid']})"
            try:
                actor = ray.get_actor(process["actor"], namespace=processes["namespace"])
                yield name, str(ray.get(actor.stacks.remote(), timeout=5))
            except (RayError, ValueError) as error:
                yield name, f"no answer: {type(error).__name__}"
    finally:
        ray.shutdown()


def has_gpus() -> bool:
    return bool(_resources().get("GPU"))


def _resources() -> dict[str, float]:
    """Return the resources of all nodes together."""
    return dict(ray.cluster_resources())  # type: ignore[no-untyped-call]


def reserve(pools: Sequence[ResourcePool], *, gpus: bool, timeout_s: float) -> dict[str, PlacementGroup]:
    """Reserve resources for all processes of all pools.

    Each pool gets one bundle per node, and each bundle of a pool is on a different node.

    Args:
        pools: The pools.
        gpus: Whether each process gets a GPU.
        timeout_s: The time, in seconds, that the cluster may take to grow.

    Raises:
        ConfigError: The cluster does not have the resources. All reservations are released.
    """
    groups = {
        pool.name: placement_group(
            [_bundle(count, gpus and pool.on_device) for count in pool.process_on_nodes],
            strategy="STRICT_SPREAD" if pool.nnodes > 1 else "PACK",
        )
        for pool in pools
    }
    there = _resources()
    asked = sum(pool.world_size for pool in pools if pool.on_device)
    fits = all(pool.nnodes == 1 for pool in pools) and (not gpus or asked <= there.get("GPU", 0))
    own = bool(there.get(PROCESS))  # a Ray that was started for this run does not grow
    deadline = time.monotonic() + (timeout_s if fits or not own else 0.0)
    missing = [pool for pool in pools if not groups[pool.name].wait(max(0.1, deadline - time.monotonic()))]
    if missing:
        for group in groups.values():
            remove_placement_group(group)
        raise _does_not_fit(pools, gpus)
    return groups


def actor_options(pool: ResourcePool, group: PlacementGroup, node: int, gpus: bool) -> dict[str, Any]:
    """Return Ray's options for an actor of a pool: the actor's node and its resources."""
    takes = _bundle(1, gpus and pool.on_device)
    return {
        "num_cpus": takes.pop("CPU", 0),
        "num_gpus": takes.pop("GPU", 0),
        "resources": takes,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
    }


def _bundle(count: int, gpus: bool) -> dict[str, float]:
    counted = PROCESS if _resources().get(PROCESS) else "CPU"
    return {counted: float(count)} | ({"GPU": float(count)} if gpus else {})


def _does_not_fit(pools: Sequence[ResourcePool], gpus: bool) -> ConfigError:
    unit = "GPU(s)" if gpus else "process(es)"
    asked = "; ".join(
        f"{pool.name}: {' + '.join(map(str, pool.process_on_nodes))} {unit} on {pool.nnodes} node(s)"
        for pool in pools
    )
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    there = "; ".join(
        f"{node['NodeManagerAddress']}: {node['Resources'].get('CPU', 0):g} CPU, "
        f"{node['Resources'].get('GPU', 0):g} GPU"
        for node in nodes
    )
    return ConfigError(
        "the cluster does not have the resources that the resource pools ask for",
        field="trainer.resource_pools",
        got=f"asked for {asked}",
        expected=f"at most the resources of {len(nodes)} node(s): {there}; the nodes of a pool are different "
        "machines",
        remedy="lower trainer.nnodes, trainer.n_gpus_per_node or the pools; or start more nodes with "
        "'tandem node' and set trainer.cluster.address=auto",
    )


def interface_of(address: str) -> str | None:
    """Return the network interface of this machine that has an IPv4 address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


_SIOCGIFADDR = 0x8915
"""Linux's request code for the address of an interface."""
