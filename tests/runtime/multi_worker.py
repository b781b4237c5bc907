"""A backend of several workers in one process: each has a thread of its own that runs its calls
in order, and a call that was queued has not happened yet, as it is between processes."""

from __future__ import annotations

from concurrent import futures
from typing import Any

import numpy as np
import torch

from tandem.protocol import DataProto, Ragged
from tandem.runtime import Index
from tandem.runtime.worker import create, execute


class ThreadHandle:
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


class ThreadWorkers:
    def __init__(self, worker_class: type, world_size: int, args: tuple, kwargs: dict) -> None:
        self.world_size = world_size
        self.workers = [create(worker_class, rank, world_size, args, kwargs) for rank in range(world_size)]
        self.lanes = [futures.ThreadPoolExecutor(1) for _ in range(world_size)]
        self.handles: list[ThreadHandle] = []

    def call(self, rank: int, method: str, args: tuple, kwargs: dict) -> ThreadHandle:
        handle = ThreadHandle(self.lanes[rank].submit(execute, self.workers[rank], method, args, kwargs))
        self.handles.append(handle)
        return handle

    def shutdown(self) -> None:
        for lane in self.lanes:
            lane.shutdown()


class ThreadBackend:
    def __init__(self) -> None:
        self.groups: list[ThreadWorkers] = []

    def launch(self, worker_class: type, pool: Any, args: tuple, kwargs: dict) -> ThreadWorkers:
        self.groups.append(ThreadWorkers(worker_class, pool.world_size, args, kwargs))
        return self.groups[-1]

    def shutdown(self) -> None:
        for group in self.groups:
            group.shutdown()


def make_batch(rows: int, seed: int = 0, uids: bool = True) -> DataProto:
    """Ragged tokens and log-probs of one family, ragged prompts of another, a dense score, uids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (rows,), generator=generator)
    total = int(lengths.sum())
    prompt_lengths = torch.randint(7, 9, (rows,), generator=generator)
    columns = {
        "tokens": Ragged.from_lengths(torch.randint(0, 99, (total,), generator=generator), lengths),
        "log_probs": Ragged.from_lengths(torch.randn(total, generator=generator), lengths),
        "prompts": Ragged.from_lengths(
            torch.randint(0, 99, (int(prompt_lengths.sum()),), generator=generator), prompt_lengths
        ),
        "score": torch.randn(rows, generator=generator),
    }
    arrays = {"uid": np.array([f"0-{row // 2}" for row in range(rows)], dtype=object)} if uids else {}
    return DataProto(columns, arrays)


def assert_same(got: DataProto, expected: DataProto) -> None:
    """Same columns with the same values in the same order."""
    assert set(got.columns) == set(expected.columns)
    assert len(got) == len(expected)
    for name, column in expected.batch.items():
        if isinstance(column, Ragged):
            assert got.ragged(name).equal(column), name
        else:
            assert torch.equal(got.dense(name), column), name
    for name, array in expected.non_tensor_batch.items():
        assert list(got.non_tensor_batch[name]) == list(array), name
