"""What a backend supplies: workers, and a way to call a method on one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tandem.runtime.future import Handle
from tandem.runtime.resource_pool import ResourcePool
from tandem.runtime.worker import Worker


class Workers(Protocol):
    """The started workers of one group."""

    @property
    def world_size(self) -> int: ...

    def call(self, rank: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Handle:
        """Queues `worker.execute` of a method on one worker. Calls of one worker run in the order
        in which they were queued."""
        ...

    def shutdown(self) -> None:
        """Ends the workers; idempotent."""
        ...


class Backend(Protocol):
    """Where workers run."""

    def launch(
        self,
        worker_class: type[Worker],
        pool: ResourcePool,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Workers:
        """One worker per process of the pool, each made by `worker.create`.

        Raises:
            ConfigError: the backend cannot give what the pool asks for.
        """
        ...
