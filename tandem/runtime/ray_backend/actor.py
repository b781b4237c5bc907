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
from tandem.runtime.dispatch import Call
from tandem.runtime.failure import Status
from tandem.runtime.host import Host
from tandem.runtime.index import Index
from tandem.runtime.ray_backend.cluster import interface_of

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


class _HostActor(Host):
    """A Host by remote calls."""

    @ray.method(concurrency_group="control")
    def whereabouts(self) -> Whereabouts:
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        node = ray.get_runtime_context().get_node_id()
        return Whereabouts(node, address, interface_of(address), os.getpid(), os.cpu_count() or 1)

    @ray.method(concurrency_group="control")
    def status(self) -> Status:  # type: ignore[override]
        return super().status()

    @ray.method(concurrency_group="control")
    def stacks(self, *, lane_only: bool = False) -> str:  # type: ignore[override]
        return super().stacks(lane_only=lane_only)

    def run(self, call: RemoteCall) -> Any:
        return self.execute(*_unpacked(call))

    @ray.method(num_returns=2)
    def run_kept(self, call: RemoteCall) -> tuple[bytes | None, Any]:
        """The result's index for the controller, and the result for whoever uses it."""
        result = self.run(call)
        return packed_index(result), result

    def run_parts(self, call: RemoteCall) -> Iterator[tuple[Any, bytes] | DataProto]:
        """Each part's rows and index for the controller, and then the part, of which the controller is given
        a reference of its own: one within what it gets could be gone before it is counted there."""
        for part in self.parts(*_unpacked(call)):
            yield part.rows, packed_index(part.batch)
            yield part.batch


Actor = Any
"""The handle of a HostActor; Ray's own types know the calls' arguments and results no better."""

HostActor: Any = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 2})(_HostActor)  # type: ignore[call-overload]
