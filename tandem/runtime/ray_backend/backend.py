"""The backend that starts, connects, watches and stops the processes of pools as Ray actors."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tandem.errors import ConfigError, WorkerFailure
from tandem.runtime.failure import Place
from tandem.runtime.ray_backend.actor import Actor, HostActor, Setup, Whereabouts
from tandem.runtime.ray_backend.cluster import actor_options, connect, has_gpus, reserve
from tandem.runtime.ray_backend.watch import Watch
from tandem.runtime.ray_backend.workers import RayWorkers
from tandem.runtime.resource_pool import ResourcePool
from tandem.runtime.worker import WorkerFactory, worker_class
from tandem.trusted import TRUST

KEYS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
"""Environment variables that another program needs to reach the same Ray cluster.

The file has Ray's token; the variable only has its path.
"""
HOSTS_FILE = "processes.json"
"""A file in the log folder that lists the processes of the run.

Other programs need this list to read the stacks of the processes.
"""


@dataclass
class Hosts:
    """The processes of a pool.

    Attributes:
        pool: The pool.
        actors: The actor of each rank.
        found: The machine and network interface of each rank.
        group: The placement group of the processes; None for helpers on the controller's machine.
    """

    pool: ResourcePool
    actors: list[Actor]
    found: list[Whereabouts]
    group: PlacementGroup | None

    @property
    def places(self) -> list[Place]:
        return [at.place for at in self.found]


@dataclass(eq=False, repr=False)
class RayBackend:
    """The backend that runs workers as Ray actors; see `Backend`.

    Args:
        name: The name of the run, for messages and for the names of its processes.
        log_dir: The folder for the log of each process, which all nodes must share; None: a new folder.
        device: "cpu"; "cuda" for one GPU per process; "auto" for "cuda" if the cluster has GPUs, else "cpu".
        address: The address of the cluster; None starts Ray on this machine.
        namespace: Ray's namespace for the names of the processes; None creates one.
        interface: The network interface of collectives; None: the interface with the node's address.
        master_port: The port on which rank 0 of the first pool with several processes listens for their
            process group. Each further pool with several processes uses the next port. 0: free ports.
        object_store_gb: The size in GiB of the object store of a Ray that is started here; None leaves it to
            Ray.
        temp_dir: The temporary folder of a Ray that is started here.
        ray_init: More arguments of `ray.init`.
        start_s: The time limit, in seconds, until all processes of the pools are up and connected.
        call_s: The time limit of one call, without waiting for its inputs.
        answer_s: The time limit of a process's answer to a status request.
        collective_s: The time limit of one collective operation.
        resources_s: The time limit for the cluster to have the requested resources.
        stop_s: The time limit of a regular shutdown. After this time, the processes are killed.
        say: Prints the workers' messages for the user.

    Raises:
        ConfigError: There is no cluster at the address.
    """

    name: str = "tandem"
    log_dir: Path | None = None
    _: KW_ONLY
    device: str = "auto"
    address: str | None = None
    namespace: str | None = None
    interface: str | None = None
    master_port: int = 0
    object_store_gb: float | None = None
    temp_dir: str | None = None
    ray_init: Mapping[str, Any] | None = None
    start_s: float = 300.0
    call_s: float = 7200.0
    answer_s: float = 30.0
    collective_s: float = 1800.0
    resources_s: float = 60.0
    stop_s: float = 10.0
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self._started_ray = connect(
            self.address,
            temp_dir=self.temp_dir,
            object_store_gb=self.object_store_gb,
            ray_init=self.ray_init,
        )
        self.gpus = self.device == "cuda" or (self.device == "auto" and has_gpus())
        self._id = f"{self.name}-{uuid.uuid4().hex[:8]}"
        self._namespace = self.namespace or self._id
        self._logs = Path(mkdtemp(prefix="tandem-")) if self.log_dir is None else self.log_dir.absolute()
        self._watch = Watch(call_s=self.call_s, answer_s=self.answer_s, say=self.say)
        self._pools: dict[str, Hosts] = {}
        self._ports: dict[str, int] = {}
        self._closed = False

    def reserve(self, pools: Sequence[ResourcePool]) -> None:
        """Start the processes of all pools at once; pools that already run are not changed.

        Raises:
            ConfigError: The cluster does not have enough resources.
            WorkerFailure: The processes did not start within `start_s`.
        """
        new = [pool for pool in pools if pool.name not in self._pools]
        groups = reserve(
            [pool for pool in new if not pool.beside_controller], gpus=self.gpus, timeout_s=self.resources_s
        )
        deadline = time.monotonic() + self.start_s
        for pool in new:
            group = groups.get(pool.name)
            self._pools[pool.name] = Hosts(pool, self._spawn(pool, group), [], group)
        started = [self._pools[pool.name] for pool in new]
        for step in (self._locate, self._connect):
            for hosts in started:
                try:
                    step(hosts, deadline)
                except (TimeoutError, WorkerFailure) as error:
                    raise self._did_not_start(hosts, error) from error.__cause__
        self._write_hosts()

    def launch(self, worker: WorkerFactory, pool: ResourcePool, role: str) -> RayWorkers:
        """Start one worker in each process of the pool; see `Backend.launch`.

        Raises:
            ConfigError: The cluster does not have enough resources, or another pool of the same name exists.
            WorkerFailure: A worker could not be created.
        """
        self.reserve([pool])
        hosts = self._pools[pool.name]
        if hosts.pool != pool:
            raise ConfigError(
                "two resource pools have the same name", field=pool.name, got=pool, expected=hosts.pool
            )
        _ship_modules_of(worker)
        factory = ray.put(worker)
        made = [actor.create.remote(role, factory) for actor in hosts.actors]
        for ref in made:
            self._watch.get(ref)
        return RayWorkers(role, hosts.actors, self._watch)

    def take_traffic(self) -> dict[str, float]:
        watch = self._watch
        taken = {
            "controller/index_bytes": float(watch.index_bytes),
            "controller/value_bytes": float(watch.value_bytes),
        }
        watch.index_bytes = watch.value_bytes = 0
        return taken

    def release(self, pool_names: Sequence[str]) -> None:
        """Stop the processes of some pools and free their resources."""
        for name in pool_names:
            hosts = self._pools.pop(name)
            self._watch.remove(name)  # first, so that the end of the processes does not count as a failure
            self._end([hosts])

    def shutdown(self) -> None:
        """Stop all processes, and Ray if it was started or joined here. Further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        self._watch.close()
        try:
            self._end(list(self._pools.values()))
        finally:
            self._pools.clear()
            if self._started_ray:
                ray.shutdown()

    def _spawn(self, pool: ResourcePool, group: PlacementGroup | None) -> list[Actor]:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        nodes = [node for node, count in enumerate(pool.process_on_nodes) for _ in range(count)]
        cwd, trusted = os.getcwd(), os.environ.get(TRUST, "")
        path = tuple(each or cwd for each in sys.path)
        actors = []
        for rank, node in enumerate(nodes):
            log = self._logs / f"{pool.name}_{rank}.log"
            setup = Setup(pool.name, rank, pool.world_size, cwd, path, log, trusted)
            where = (
                {"num_cpus": 0, "scheduling_strategy": here}
                if group is None
                else actor_options(pool, group, node, self.gpus)
            )
            named = {"name": self._actor_name(pool.name, rank), "namespace": self._namespace}
            actors.append(HostActor.options(**where, **named).remote(setup))
        return actors

    def _locate(self, hosts: Hosts, deadline: float) -> None:
        """Wait until a pool's processes report their machine and interface, then start to watch them."""
        asked = [actor.whereabouts.remote() for actor in hosts.actors]
        for actor, ref in zip(hosts.actors, asked, strict=True):
            at = self._get_before(deadline, ref)
            hosts.found.append(at)
            self._watch.add(at.place, actor)

    def _connect(self, hosts: Hosts, deadline: float) -> None:
        """Set the process group's environment and the number of CPU threads in each process of a pool."""
        group = self._process_group(hosts, deadline)
        busy = [at.machine for known in self._pools.values() if known.pool.on_device for at in known.found]
        machines = [at.machine for at in hosts.found]
        joined = []
        for rank, (actor, at) in enumerate(zip(hosts.actors, hosts.found, strict=True)):
            own = {"LOCAL_RANK": "0" if self.gpus else str(machines[:rank].count(at.machine))}
            if group:
                own |= group | {"RANK": str(rank)}
            defaults = _interface_names(at.interface) if group else {}
            threads = _threads(at.cores, busy.count(at.machine) if hosts.pool.on_device else at.cores)
            joined.append(actor.join.remote(own, defaults, threads))
        for ref in joined:
            self._get_before(deadline, ref)

    def _process_group(self, hosts: Hosts, deadline: float) -> dict[str, str]:
        """Return the environment that makes a pool's processes one `torch.distributed` group.

        The result is {} for a pool of one process.
        """
        if hosts.pool.world_size == 1:
            return {}
        address = hosts.found[0].place.node
        port = 0
        if self.master_port != 0:  # the first pool takes this port, and further pools the next ones
            taken = {port for name, port in self._ports.items() if name in self._pools}
            port = next(port for port in itertools.count(self.master_port) if port not in taken)
            self._ports[hosts.pool.name] = port
        served = hosts.actors[0].serve_rendezvous.remote(address, port, self.collective_s)
        return {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(self._get_before(deadline, served)),
            "WORLD_SIZE": str(hosts.pool.world_size),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            **_interface_names(self.interface),
        }

    def _did_not_start(self, hosts: Hosts, error: TimeoutError | WorkerFailure) -> WorkerFailure:
        pool = hosts.pool
        if isinstance(error, WorkerFailure):
            what, restartable = str(error), error.restartable
        else:
            what = f"not all processes were up within trainer.timeouts.start={self.start_s:g} s"
            restartable = True
        return WorkerFailure(
            f"the resource pool '{pool.name}' could not be started: {what}\n"
            f"  answered: {len(hosts.found)} of {pool.world_size} processes\n"
            f"  logs:     {self._logs} (all nodes must share this folder)",
            restartable=restartable,
        )

    def _actor_name(self, pool: str, rank: int) -> str:
        return f"{self._id}_{pool}_{rank}"

    def _get_before(self, deadline: float, ref: ray.ObjectRef[Any]) -> Any:
        return self._watch.get(ref, max(0.0, deadline - time.monotonic()))

    def _end(self, ending: Sequence[Hosts]) -> None:
        """Stop processes: first regularly, if they still answer, then with a kill.

        Wait until the processes on this machine have ended.
        """
        actors = [actor for hosts in ending for actor in hosts.actors]
        with suppress(RayError, WorkerFailure):  # all processes are killed below in any case
            self._watch.check()
            closing = [actor.close.remote() for actor in actors]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=self.stop_s)
        for actor in actors:
            ray.kill(actor)
        for hosts in ending:
            if hosts.group is not None:
                remove_placement_group(hosts.group)
        here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        pids = [place.pid for hosts in ending for place in hosts.places if place.node == here]
        deadline = time.monotonic() + self.stop_s
        while any(map(_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _write_hosts(self) -> None:
        places = [place for hosts in self._pools.values() for place in hosts.places]
        content = {
            "address": ray.get_runtime_context().gcs_address,
            "namespace": self._namespace,
            "environment": {name: value for name in KEYS if (value := os.environ.get(name)) is not None},
            "controller": os.getpid(),
            "processes": [
                {
                    "name": f"{place.pool}_{place.rank}",
                    "actor": self._actor_name(place.pool, place.rank),
                    "node": place.node,
                    "pid": place.pid,
                    "log": str(place.log),
                }
                for place in places
            ],
        }
        self._logs.mkdir(parents=True, exist_ok=True)
        partial_file = self._logs / f"{HOSTS_FILE}.partial"
        partial_file.write_text(json.dumps(content, indent=1), encoding="utf-8")
        partial_file.replace(self._logs / HOSTS_FILE)


def _interface_names(interface: str | None) -> dict[str, str]:
    """Return the environment variables that make collectives use a network interface."""
    return {f"{library}_SOCKET_IFNAME": interface for library in ("GLOO", "NCCL") if interface}


def _threads(cores: int, processes: int) -> int:
    asked = os.environ.get("OMP_NUM_THREADS")
    return int(asked) if asked and asked.isdigit() else max(1, cores // processes)


def _ship_modules_of(worker: WorkerFactory) -> None:
    """Register modules that other processes cannot import, such as a user's files, to be sent as code."""
    values = [worker_class(worker)]
    if isinstance(worker, partial):
        values += [*worker.args, *worker.keywords.values()]
    for value in values:
        function = getattr(value, "function", value)
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        if module is None or module.__name__ == "__main__" or getattr(module, "__file__", None) is None:
            continue  # a module without a file is part of the interpreter
        if PathFinder.find_spec(module.__name__.split(".")[0]) is None:
            ray.cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
