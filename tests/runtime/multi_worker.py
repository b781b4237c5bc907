"""A backend of several workers in one process; each has a thread that runs its calls in order."""

import queue
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any, ClassVar

import numpy as np
import torch

from tandem.protocol import DataProto, Ragged
from tandem.runtime import Index, Part, StreamPart, Usage, WorkerFactory
from tandem.runtime.handle import Done
from tandem.runtime.worker import create, execute


class ThreadHandle:
    """A promised result that counts how often its value was fetched."""

    borrowed = False

    def __init__(self, promise: futures.Future) -> None:
        self.promise = promise
        self.values_moved = 0

    def get(self, timeout_s: float | None = None) -> Any:
        self.values_moved += 1
        return self.promise.result(timeout_s)

    def index(self, timeout_s: float | None = None) -> Index:
        return Index.of(self.promise.result(timeout_s))

    def wait(self, timeout_s: float | None = None) -> None:
        self.promise.result(timeout_s)

    def done(self) -> bool:
        return self.promise.done()


STORE: dict[int, DataProto | None] = {}
"""The content of an object store. None means that the value does not exist yet."""


class StoredHandle:
    """A picklable handle of a batch in STORE; all its copies count together what is fetched and asked."""

    fetched: ClassVar[Counter[int]] = Counter()
    asked: ClassVar[Counter[int]] = Counter()

    def __init__(self, batch: DataProto | None, borrowed: bool = False) -> None:
        self.key = len(STORE)
        self.borrowed = borrowed
        STORE[self.key] = batch

    def _batch(self) -> DataProto:
        batch = STORE[self.key]
        if batch is None:
            raise TimeoutError("not made yet")
        return batch

    def get(self, timeout_s: float | None = None) -> Any:
        self.fetched[self.key] += 1
        return self._batch()

    def index(self, timeout_s: float | None = None) -> Index:
        self.asked[self.key] += 1
        return Index.of(self._batch())

    def wait(self, timeout_s: float | None = None) -> None:
        self._batch()

    def done(self) -> bool:
        return STORE[self.key] is not None

    def moved(self) -> int:
        return self.fetched.pop(self.key, 0)


class ThreadWorkers:
    def __init__(self, factory: WorkerFactory, world_size: int) -> None:
        self.world_size = world_size
        self.workers = [create(factory, rank, world_size) for rank in range(world_size)]
        self.lanes = [futures.ThreadPoolExecutor(1) for _ in range(world_size)]
        self.handles: list[ThreadHandle] = []
        self.busy_s = [0.0] * world_size

    def call(self, method: str, calls: Sequence[Any], *, keeps: bool) -> list[ThreadHandle | None]:
        assert len(calls) == self.world_size
        handles = [
            None if call is None else ThreadHandle(self.lanes[rank].submit(self._run, rank, method, call))
            for rank, call in enumerate(calls)
        ]
        self.handles += [handle for handle in handles if handle is not None]
        return handles

    def stream(self, method: str, calls: Sequence[Any]) -> Iterator[StreamPart]:
        parts: queue.SimpleQueue[tuple[int, Part | None]] = queue.SimpleQueue()
        called = [(rank, call) for rank, call in enumerate(calls) if call is not None]
        lanes = [self.lanes[rank].submit(self._stream, rank, method, call, parts) for rank, call in called]
        return self._merged(parts, lanes)

    def _run(self, rank: int, method: str, call: Any) -> Any:
        start = time.perf_counter()
        try:
            return execute(self.workers[rank], method, *call)
        finally:
            self.busy_s[rank] += time.perf_counter() - start

    def _stream(self, rank: int, method: str, call: Any, parts: queue.SimpleQueue) -> None:
        try:
            for part in execute(self.workers[rank], method, *call):
                parts.put((rank, part))
        finally:
            parts.put((rank, None))

    @staticmethod
    def _merged(parts: queue.SimpleQueue, lanes: list[futures.Future]) -> Iterator[StreamPart]:
        running = len(lanes)
        while running:
            rank, part = parts.get()
            if part is None:
                running -= 1
            else:
                yield StreamPart(rank, part.rows, Done(part.batch))
        for lane in lanes:
            lane.result()

    def take_usage(self) -> list[Usage]:
        taken, self.busy_s = self.busy_s, [0.0] * self.world_size
        return [Usage(busy_s=seconds) for seconds in taken]

    def shutdown(self) -> None:
        for lane in self.lanes:
            lane.shutdown()


class ThreadBackend:
    def __init__(self) -> None:
        self.groups: list[ThreadWorkers] = []

    def reserve(self, pools: Sequence[Any]) -> None:
        """Do nothing: there are always enough threads."""

    def launch(self, worker: WorkerFactory, pool: Any, role: str) -> ThreadWorkers:
        self.groups.append(ThreadWorkers(worker, pool.world_size))
        return self.groups[-1]

    def take_traffic(self) -> dict[str, float]:
        return {}

    def shutdown(self) -> None:
        for group in self.groups:
            group.shutdown()


def make_batch(rows: int, seed: int = 0, uids: bool = True) -> DataProto:
    """Return a batch in which tokens and log-probs have equal lengths, and prompts have others."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (rows,), generator=generator)
    total = int(lengths.sum())
    asked = torch.randint(7, 9, (rows,), generator=generator)
    tokens, prompts = (torch.randint(0, 99, (n,), generator=generator) for n in (total, int(asked.sum())))
    columns = {
        "tokens": Ragged.from_lengths(tokens, lengths),
        "log_probs": Ragged.from_lengths(torch.randn(total, generator=generator), lengths),
        "prompts": Ragged.from_lengths(prompts, asked),
        "score": torch.randn(rows, generator=generator),
    }
    arrays = {"uid": np.array([f"0-{row // 2}" for row in range(rows)], dtype=object)} if uids else {}
    return DataProto(columns, arrays)


def assert_same(got: DataProto, expected: DataProto) -> None:
    assert (set(got.columns), len(got)) == (set(expected.columns), len(expected))
    for name, column in expected.batch.items():
        ragged = isinstance(column, Ragged)
        assert got.ragged(name).equal(column) if ragged else torch.equal(got.dense(name), column), name
    for name, array in expected.non_tensor_batch.items():
        assert list(got.non_tensor_batch[name]) == list(array), name


def assert_index_of(index: Index, batch: DataProto) -> None:
    assert (len(index), set(index.columns)) == (len(batch), set(batch.columns))
    lengths = {name: c.lengths.tolist() for name, c in batch.batch.items() if isinstance(c, Ragged)}
    assert {name: each.tolist() for name, each in index.lengths.items()} == lengths
