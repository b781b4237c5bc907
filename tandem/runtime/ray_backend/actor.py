"""The Ray actor around a Host. Calls run one after the other in the order in which the controller made them;
the control lane answers beside them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from tandem.protocol import DataProto
from tandem.runtime.backend import Usage
from tandem.runtime.dispatch import Call
from tandem.runtime.failure import Status
from tandem.runtime.host import Host, Setup
from tandem.runtime.index import Index
from tandem.runtime.ray_backend.cluster import interface_of
from tandem.runtime.worker import WorkerFactory

PLAIN = (bool, int, float, str)
RemoteCall = tuple[str, str, tuple[Any, ...], Mapping[str, Any]] | bytes
"""Role, method and its arguments; one argument to Ray, which packs each apart. See `packed_call`."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The machine and the network in which a process found itself.

    Attributes:
        node: Ray's id of the machine.
        address, interface: the machine's, in its network.
        pid: the process.
        cores: of the machine.
    """

    node: str
    address: str
    interface: str | None
    pid: int
    cores: int


def packed_index(batch: Any) -> bytes:
    """A batch's index as the controller receives it."""
    return pickle.dumps(Index.of(batch), protocol=5)


def packed_call(role: str, method: str, call: Call) -> RemoteCall:
    """Packs a call for an actor. Ray needs to know nothing of plain values, and bytes cost it the least."""
    args, kwargs = call
    whole = (role, method, args, kwargs)
    plain = all(value is None or type(value) in PLAIN for value in (*args, *kwargs.values()))
    return pickle.dumps(whole, protocol=5) if plain else whole


def _unpacked(call: RemoteCall) -> tuple[str, str, tuple[Any, ...], Mapping[str, Any]]:
    return pickle.loads(call) if isinstance(call, bytes) else call


class _HostActor:
    """A Host by remote calls."""

    def __init__(self, setup: Setup) -> None:
        self.host = Host(setup)

    @ray.method(concurrency_group="control")
    def whereabouts(self) -> Whereabouts:
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        node = ray.get_runtime_context().get_node_id()
        return Whereabouts(node, address, interface_of(address), os.getpid(), os.cpu_count() or 1)

    @ray.method(concurrency_group="control")
    def status(self) -> Status:
        return self.host.status()

    @ray.method(concurrency_group="control")
    def stacks(self, lane_only: bool = False) -> str:
        return self.host.stacks(lane_only=lane_only)

    def serve_rendezvous(self, address: str, port: int, timeout_s: float) -> int:
        return self.host.serve_rendezvous(address, port, timeout_s)

    def join(self, environment: Mapping[str, str], defaults: Mapping[str, str], threads: int) -> None:
        self.host.join(environment, defaults, threads)

    def create(self, role: str, factory: WorkerFactory) -> None:
        self.host.create(role, factory)

    def remove(self, role: str) -> None:
        self.host.remove(role)

    def execute(self, call: RemoteCall) -> Any:
        return self.host.execute(*_unpacked(call))

    @ray.method(num_returns=2)
    def execute_kept(self, call: RemoteCall) -> tuple[bytes | None, Any]:
        """The result's index for the controller, and the result for whoever uses it."""
        result = self.host.execute(*_unpacked(call))
        return packed_index(result), result

    def parts(self, call: RemoteCall) -> Iterator[tuple[Any, bytes] | DataProto]:
        """Each part's rows and index for the controller, and then the part, of which the controller is given
        a reference of its own: one within what it gets could be gone before it is counted there."""
        for part in self.host.parts(*_unpacked(call)):
            yield part.rows, packed_index(part.batch)
            yield part.batch

    def take_usage(self, role: str) -> Usage:
        return self.host.take_usage(role)

    def close(self) -> None:
        self.host.close()


Actor = Any
"""The handle of a HostActor; Ray's own types know the calls' arguments and results no better."""

HostActor: Any = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 2})(_HostActor)  # type: ignore[call-overload]
