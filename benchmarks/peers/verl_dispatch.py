"""verl's side of dispatch.py. Runs in verl's own environment (`make peers`).

verl moves a batch in several ways: a DataProto through the controller with DP_COMPUTE_PROTO ("proto") or with
its engine workers' mesh dispatch ("mesh"), the TensorDict of those workers ("tensordict"), and a future. An
environment variable selects how a DataProto is serialised: with torch.save, or as NumPy arrays.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import ray
import tensordict
import torch
import verl
from sides import seconds, serve
from tensordict import TensorDict
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

MESH = make_nd_compute_dataproto_dispatch_fn("data")
SERIALISATION = "VERL_DATAPROTO_SERIALIZATION_METHOD"
Widths = dict[str, int]
"""Column name → float32 values per token. Every batch has the column `tokens` in addition."""


def make_columns(rows: int, length: int, widths: Widths, seed: int) -> dict[str, torch.Tensor]:
    """Make padded columns (rows, length) of random content."""
    torch.manual_seed(seed)
    shapes = {name: (rows, length) if width == 1 else (rows, length, width) for name, width in widths.items()}
    table = {name: torch.rand(shape) for name, shape in shapes.items()}
    return {"tokens": torch.randint(150_000, (rows, length)), **table}


def checksum(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum over all memory as int64 of shape (1), four bytes at a time."""
    return sum(tensor.contiguous().view(torch.int32).sum() for tensor in tensors).reshape(1)


class BenchWorker(Worker):
    """A worker that holds rows of a batch, hands them out, and reads other rows."""

    def __init__(self, rows: int = 0, length: int = 0, widths: Widths | None = None) -> None:
        super().__init__()
        self._register_dispatch_collect_info("data", dp_rank=self.rank, is_collect=True)
        self.held = make_columns(rows, length, widths or {}, self.rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        return None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def small(self, batch: DataProto) -> DataProto:
        return batch.select(batch_keys=["tokens"])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def serialise(self, method: str) -> None:
        """Select the serialisation of later calls, and free what the last call left in memory."""
        os.environ[SERIALISATION] = method
        gc.collect()

    def first(self, count: int) -> dict[str, torch.Tensor]:
        return {name: tensor[:count] for name, tensor in self.held.items()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checksum(self, rows: int) -> int:
        """Return the checksum of the first rows that this worker holds."""
        return int(checksum(self.first(rows).values()))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def produce_proto(self, rows: DataProto) -> DataProto:
        return DataProto.from_dict(self.first(len(rows)))

    @register(dispatch_mode=MESH)
    def produce_mesh(self, rows: DataProto) -> DataProto:
        return DataProto.from_dict(self.first(len(rows)))

    @register(dispatch_mode=MESH)
    def produce_tensordict(self, rows: DataProto) -> TensorDict:
        return TensorDict(self.first(len(rows)), batch_size=len(rows))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def produce_future(self, rows: DataProto) -> DataProto:
        return DataProto.from_dict(self.first(len(rows)))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def consume_proto(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"checksum": checksum(batch.batch.values())})

    @register(dispatch_mode=MESH)
    def consume_mesh(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"checksum": checksum(batch.batch.values())})

    @register(dispatch_mode=MESH)
    def consume_tensordict(self, batch: TensorDict) -> TensorDict:
        return TensorDict({"checksum": checksum(batch.values())}, batch_size=1)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def consume_future(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"checksum": checksum(batch.batch.values())})


class VerlSide:
    """The requests of dispatch.py."""

    def __init__(self) -> None:
        self._groups: list[RayWorkerGroup] = []

    def versions(self) -> dict[str, str]:
        return {"verl": verl.__version__, "tensordict": tensordict.__version__}

    def start(self, threads: int) -> None:
        torch.set_num_threads(threads)
        ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False)

    def stop(self) -> None:
        self._groups.clear()
        ray.shutdown()

    def _group(self, processes: int, **init: Any) -> RayWorkerGroup:
        pool = RayResourcePool([processes], use_gpu=False, max_colocate_count=1)
        made = RayClassWithInitArgs(ray.remote(BenchWorker), **init)
        self._groups.append(RayWorkerGroup(pool, made, device_name="cpu"))
        self._groups[-1].nothing()
        return self._groups[-1]

    def _serialise(self, method: str) -> None:
        os.environ[SERIALISATION] = method
        gc.collect()
        for group in self._groups:
            group.serialise(method)

    def open_calls(self, processes: int, rows: int, length: int) -> None:
        self._group(processes)
        self._batch = DataProto.from_dict(make_columns(rows, length, {"log_probs": 1}, 0))

    def calls(self, times: int, serialisation: str) -> dict[str, float]:
        self._serialise(serialisation)
        (group,) = self._groups
        small = seconds(lambda: group.small(self._batch), times)
        return {"nothing": seconds(group.nothing, times), "small": small}

    def open_move(self, producers: int, consumers: int, rows: int, length: int, widths: Widths) -> None:
        self._group(producers, rows=rows // producers, length=length, widths=widths)
        self._group(consumers)

    def move(self, way: str, serialisation: str, rows: int, reordered: bool) -> float:
        """Return the seconds from the call that produces the batch to the end of the call that reads it."""
        self._serialise(serialisation)
        asked, order = DataProto.from_dict({"row": torch.arange(rows)}), torch.randperm(rows)
        expected = sum(self._groups[0].checksum(rows // self._groups[0].world_size))
        produce = getattr(self._groups[0], f"produce_{way}")
        consume = getattr(self._groups[1], f"consume_{way}")
        seen: list[Any] = []

        def work() -> None:
            batch = produce(asked)
            if reordered and isinstance(batch, TensorDict):
                batch = batch[order]
            elif reordered:
                batch.reorder(order)
            seen.append(consume(batch))

        took = seconds(work)
        (table,) = (read if isinstance(read, TensorDict) else read.batch for read in seen)
        assert int(table["checksum"].sum()) == expected
        return took

    def open_tables(self, rows: int, length: int, widths: Widths, parts: int) -> None:
        uids = np.array([str(row) for row in range(rows)], dtype=object)
        self._table = DataProto.from_dict(make_columns(rows, length, widths, 0), {"uid": uids})
        indices = np.array_split(np.arange(rows), parts)
        self._parts = [self._table.select_idxs(part) for part in indices]
        names = list(self._table.batch.keys())
        self._left, self._right = names[: len(names) // 2], names[len(names) // 2 :]
        self._order = torch.randperm(rows)

    def tables(self, times: int) -> dict[str, float]:
        """Return the median seconds of each operation.

        verl's union and reorder change their table, so each operation gets its own table.
        """
        table, left, right = self._table, self._left, self._right
        names = [*left, *right]
        return {
            "concat": seconds(DataProto.concat, times, lambda: (self._parts,)),
            "chunk": seconds(table.chunk, times, lambda: (len(self._parts),)),
            "reorder": seconds(DataProto.reorder, times, lambda: (table.select(names), self._order)),
            "union": seconds(DataProto.union, times, lambda: (table.select(left), table.select(right, []))),
        }


if __name__ == "__main__":
    side = VerlSide()
    serve({name: getattr(side, name) for name in dir(side) if not name.startswith("_")})
