"""The local backend: one worker of each role, in the controller's process, every call at once, but for those
of workers that mostly wait (`Worker.aside`). Exceptions keep their traceback, breakpoints stop where they
stand, and nothing is copied."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar
from weakref import WeakSet

from tandem.device import set_threads
from tandem.errors import ConfigError
from tandem.runtime.backend import StreamPart, Usage
from tandem.runtime.dispatch import Call
from tandem.runtime.future import Done, Handle
from tandem.runtime.handle import Aside
from tandem.runtime.resource_pool import ResourcePool
from tandem.runtime.worker import Worker, WorkerFactory, create, execute

Result = TypeVar("Result")


class LocalBackend:
    """See `Backend`."""

    gpus = None

    def __init__(self) -> None:
        self._launched: WeakSet[LocalWorkers] = WeakSet()  # their groups keep them

    def reserve(self, pools: Sequence[ResourcePool]) -> None:
        """Makes sure that the pools ask for this process alone.

        Raises:
            ConfigError: a pool has more than one process.
        """
        for pool in pools:
            if pool.world_size != 1:
                raise ConfigError(
                    "the local backend runs everything in one process",
                    field="trainer.backend",
                    got=f"resource pool '{pool.name}' of {pool.world_size} processes",
                    expected="1 process",
                    remedy="set trainer.backend=ray, or ask for one process",
                )

    def launch(self, worker: WorkerFactory, pool: ResourcePool, role: str) -> LocalWorkers:
        self.reserve([pool])
        workers = LocalWorkers(create(worker, 0, 1))
        self._launched.add(workers)
        return workers

    def release(self, pool_names: Sequence[str]) -> None:
        """There are no processes to end."""

    def take_traffic(self) -> dict[str, float]:
        """Nothing travels."""
        return {}

    def shutdown(self) -> None:
        for workers in self._launched:
            workers.shutdown()


class LocalWorkers:
    """A single worker."""

    world_size = 1

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._busy_s = 0.0
        self._aside = (
            ThreadPoolExecutor(1, type(worker).__name__, set_threads, (1,)) if worker.aside else None
        )

    def call(self, method: str, calls: Sequence[Call | None], *, keeps: bool) -> list[Handle | None]:
        (call,) = calls
        if call is None:
            return [None]
        timed = partial(self._timed, partial(execute, self._worker, method, *call))
        return [Done(timed()) if self._aside is None else Aside(self._aside.submit(timed))]

    def stream(self, method: str, calls: Sequence[Call | None]) -> Iterator[StreamPart]:
        (call,) = calls
        if call is None:
            return
        parts = execute(self._worker, method, *call)
        while (part := self._timed(lambda: next(parts, None))) is not None:
            yield StreamPart(0, part.rows, Done(part.batch))

    def _timed(self, run: Callable[[], Result]) -> Result:
        start = time.perf_counter()
        try:
            return run()
        finally:
            self._busy_s += time.perf_counter() - start

    def take_usage(self) -> list[Usage]:
        taken, self._busy_s = Usage(busy_s=self._busy_s), 0.0
        return [taken]

    def shutdown(self) -> None:
        """The worker goes when the group goes; what it waits for ends now."""
        if self._aside is not None:
            self._aside.shutdown(wait=False, cancel_futures=True)
        self._worker.close()
