"""The interface through which a controller starts workers and calls their methods."""

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
    """The seconds that a worker spent in each activity since the last call of `take_usage`.

    Attributes:
        busy_s: Seconds inside the worker's methods.
        wait_s: Seconds spent waiting for inputs that did not exist yet.
        transfer_s: Seconds spent copying existing inputs to the worker's process.
        transfer_bytes: The number of bytes copied in `transfer_s`.
    """

    busy_s: float = 0.0
    wait_s: float = 0.0
    transfer_s: float = 0.0
    transfer_bytes: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class StreamPart:
    """Some samples from the result of a streaming method on one worker.

    Attributes:
        rank: The rank of the worker.
        rows: The row numbers of the samples in the worker's complete result.
        handle: The handle of the batch with these samples.
    """

    rank: int
    rows: Sequence[int]
    handle: Handle


class Workers(Protocol):
    """The started workers of one group.

    The calls of one worker run in the order in which they were made.
    """

    @property
    def world_size(self) -> int: ...

    def call(self, method: str, calls: Sequence[Call | None], *, keeps: bool) -> list[Handle | None]:
        """Queue one call of `worker.execute` on each rank.

        Args:
            method: The name of the method.
            calls: One (args, kwargs) per rank; None for a rank that is not called.
            keeps: Whether the result is a batch that stays in the worker's process until another process
                fetches it.
        """

    def stream(self, method: str, calls: Sequence[Call | None]) -> Iterator[StreamPart]:
        """Run a streaming method on each rank, and yield each part of the results as soon as it exists."""

    def take_usage(self) -> list[Usage]:
        """Return each rank's usage since the last call."""

    def shutdown(self) -> None:
        """Stop the workers. Further calls of `shutdown` do nothing."""


class Backend(Protocol):
    """The environment in which workers run: one process, or a cluster."""

    @property
    def gpus(self) -> bool | None:
        """Whether the workers have GPUs; None if each worker chooses its device itself."""

    def reserve(self, pools: Sequence[ResourcePool]) -> None:
        """Reserve the processes and devices of all pools at once.

        Raises:
            ConfigError: The backend does not have enough processes or devices.
        """

    def launch(self, worker: WorkerFactory, pool: ResourcePool, role: str) -> Workers:
        """Create one worker in each process of the pool, with `tandem.runtime.worker.create`.

        Workers of several roles on one pool share its processes.

        Raises:
            ConfigError: The backend cannot provide the pool's processes or devices.
        """

    def release(self, pool_names: Sequence[str]) -> None:
        """Stop the processes of some pools. The worker groups of these pools must already be shut down."""

    def take_traffic(self) -> dict[str, float]:
        """Return the number of bytes that the controller received since the last call.

        `controller/index_bytes` counts indices and small results. `controller/value_bytes` counts batches.
        """

    def shutdown(self) -> None:
        """Stop all workers. Further calls of `shutdown` do nothing."""
