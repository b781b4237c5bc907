"""The local backend: one worker per role, all in the controller's process.

Every call runs at once, except calls of workers that mostly wait (`Worker.in_thread`), which run in a thread.
Exceptions keep their traceback, breakpoints work as usual, and no values are copied.
"""

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
from tandem.runtime.handle import InThread
from tandem.runtime.resource_pool import ResourcePool
from tandem.runtime.worker import Worker, WorkerFactory, create, execute

Result = TypeVar("Result")


class LocalBackend:
    """The backend that runs all workers in the controller's process; see `Backend`."""

    gpus = None

    def __init__(self) -> None:
        self._launched: WeakSet[LocalWorkers] = WeakSet()  # the groups keep their workers alive

    def reserve(self, pools: Sequence[ResourcePool]) -> None:
        """Check that each pool asks for one process.

        Raises:
            ConfigError: A pool has more than one process.
        """
        for pool in pools:
            if pool.world_size != 1:
                raise ConfigError(
                    "the local backend runs everything in one process",
                    field="trainer.backend",
                    got=f"resource pool '{pool.name}' of {pool.world_size} processes",
                    expected="1 process",
                    remedy="set trainer.backend=ray, or use one process per pool",
                )

    def launch(self, worker: WorkerFactory, pool: ResourcePool, role: str) -> LocalWorkers:
        self.reserve([pool])
        workers = LocalWorkers(create(worker, 0, 1))
        self._launched.add(workers)
        return workers

    def release(self, pool_names: Sequence[str]) -> None:
        """Do nothing, because there are no other processes."""

    def take_traffic(self) -> dict[str, float]:
        """Return {}, because no values are sent between processes."""
        return {}

    def shutdown(self) -> None:
        for workers in self._launched:
            workers.shutdown()


class LocalWorkers:
    """The single worker of a group."""

    world_size = 1

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._busy_s = 0.0
        self._thread = (
            ThreadPoolExecutor(1, type(worker).__name__, set_threads, (1,)) if worker.in_thread else None
        )

    def call(self, method: str, calls: Sequence[Call | None], *, keeps: bool) -> list[Handle | None]:
        (call,) = calls
        if call is None:
            return [None]
        timed = partial(self._timed, partial(execute, self._worker, method, *call))
        return [Done(timed()) if self._thread is None else InThread(self._thread.submit(timed))]

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
        """Interrupt the worker's waiting methods. The worker itself is freed together with its group."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._worker.close()
