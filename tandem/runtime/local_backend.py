"""The local backend: one worker, in the controller's process, every call at once. Exceptions keep
their traceback, breakpoints stop where they stand, and nothing is copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.errors import ConfigError
from tandem.runtime.future import Done
from tandem.runtime.resource_pool import ResourcePool
from tandem.runtime.worker import Worker, create, execute


class LocalBackend:
    def launch(
        self,
        worker_class: type[Worker],
        pool: ResourcePool,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> LocalWorkers:
        """
        Raises:
            ConfigError: the pool has more than one process.
        """
        if pool.world_size != 1:
            raise ConfigError(
                "the local backend runs one process",
                field="trainer.backend",
                got=f"a resource pool of {pool.world_size} processes",
                expected="1 process",
                remedy="set trainer.n_gpus_per_node=1 and trainer.nnodes=1",
            )
        return LocalWorkers(create(worker_class, 0, 1, args, kwargs))


class LocalWorkers:
    """A single worker."""

    world_size = 1

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def call(self, rank: int, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Done:
        assert rank == 0, rank
        return Done(execute(self._worker, method, args, kwargs))

    def shutdown(self) -> None:
        """The worker goes when the group goes."""
