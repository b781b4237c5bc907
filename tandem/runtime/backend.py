"""Backend: the interface by which a controller gets workers and calls their methods."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

from tandem.runtime.dispatch import Call
from tandem.runtime.future import Handle
from tandem.runtime.resource_pool import ResourcePool
from tandem.runtime.worker import WorkerFactory


@dataclass(frozen=True, slots=True)
class Usage:
    """The time that a worker spent since the last count, by what it spent it on.

    Attributes:
        busy_s: seconds in its methods.
        wait_s: seconds waiting for inputs that did not exist yet.
        transfer_s: seconds bringing existing inputs to its process.
        transfer_bytes: bytes so brought.
    """

    busy_s: float = 0.0
    wait_s: float = 0.0
    transfer_s: float = 0.0
    transfer_bytes: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class StreamPart:
    """Some samples of a streaming method.

    Attributes:
        rank: the worker's.
        rows: their places in that worker's whole result.
        handle: the batch.
    """

    rank: int
    rows: Sequence[int]
    handle: Handle


class Workers(Protocol):
    """The started workers of one group. Calls of one worker run in the order in which they were made."""

    @property
    def world_size(self) -> int: ...

    def call(self, method: str, calls: Sequence[Call | None], *, keeps: bool) -> list[Handle | None]:
        """Queues `worker.execute` of a method.

        Args:
            calls: one per rank; None for a rank that is not called.
            keeps: the result is a batch that stays with the worker until somebody gets it.
        """

    def stream(self, method: str, calls: Sequence[Call | None]) -> Iterator[StreamPart]:
        """The parts of all ranks in the order in which they come to exist."""

    def take_usage(self) -> list[Usage]:
        """By rank, since the last call."""

    def shutdown(self) -> None:
        """Ends the workers; idempotent."""


class Backend(Protocol):
    """The place where workers run: one process, or a cluster."""

    @property
    def gpus(self) -> bool | None:
        """Whether workers have GPUs; None where each chooses its device itself."""

    def reserve(self, pools: Sequence[ResourcePool]) -> None:
        """Makes sure that there are the processes and devices that the pools ask for, all at once.

        Raises:
            ConfigError: there are not.
        """

    def launch(self, worker: WorkerFactory, pool: ResourcePool, role: str) -> Workers:
        """One worker per process of the pool, each made by `worker.create`. Workers of several
        roles on one pool share its processes.

        Raises:
            ConfigError: the backend cannot give what the pool asks for.
        """

    def release(self, pool_names: Sequence[str]) -> None:
        """Ends the processes of some pools; their groups have been shut down."""

    def take_traffic(self) -> dict[str, float]:
        """Bytes that came to the controller since the last call: `controller/index_bytes`, of indices
        and small results, and `controller/value_bytes`, of batches."""

    def shutdown(self) -> None:
        """Ends all workers; idempotent."""
