"""Small workers for tests of the controller, which any process can import."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tandem.protocol import DataProto
from tandem.runtime import Dispatch, Mesh, Part, Worker, register
from tandem.runtime.dispatch import dispatch_batches


def add_up(mesh: Mesh, results: list[Any]) -> int:
    return sum(results)


def countdown(mesh: Mesh, args: tuple, kwargs: dict) -> list[Any]:
    """Give world_size - rank to each rank; rank 1 is not called."""
    return [((mesh.world_size - rank,), {}) if rank != 1 else None for rank in range(mesh.world_size)]


def backwards(mesh: Mesh, results: list[Any]) -> list[Any]:
    return results[::-1]


class Toy(Worker):
    def __init__(self, scale: float, fail_on: int = -1) -> None:
        self.scale = scale
        self.fail_on = fail_on
        self.place_at_init = (self.rank, self.world_size)
        self.seen: list[int] = []

    @register(blocking=False)
    def double(self, batch: DataProto) -> DataProto:
        self.seen.append(len(batch))
        return DataProto({"doubled": batch.dense("score") * self.scale})

    @register()
    def scores(self, batch: DataProto, *, offset: float = 0.0) -> DataProto:
        batch.pop(["tokens"])
        return DataProto({"score": batch.dense("score") + offset}, batch.non_tensor_batch)

    @register(collect="first")
    def rows_of_rank_zero(self, batch: DataProto) -> int:
        return len(batch)

    @register()
    def nothing(self, batch: DataProto) -> None:
        self.seen.append(len(batch))

    @register(Dispatch.ONE_TO_ALL)
    def ranks(self) -> tuple[int, int]:
        assert self.place_at_init == (self.rank, self.world_size)
        return self.rank, self.world_size

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def history(self) -> list[int]:
        return self.seen

    @register(Dispatch.RANK_ZERO)
    def only_zero(self, value: float) -> float:
        return value + self.rank

    @register(Dispatch.RANK_ZERO)
    def only_zero_of(self, value: Any) -> Any:
        return value

    @register(blocking=False)
    def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(Dispatch.ALL_TO_ALL)
    def own_item(self, item: str) -> str:
        return f"{item}{self.rank}"

    @register(Dispatch.DP_COMPUTE)
    def negate(self, items: list[int]) -> list[int]:
        return [-item for item in items]

    @register((dispatch_batches, add_up))
    def count(self, batch: DataProto) -> int:
        return len(batch)

    @register(Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        if self.rank == self.fail_on:
            raise ValueError(f"broken on {self.rank}")

    @register()
    def fail_batch(self, batch: DataProto) -> DataProto:
        self.fail()
        return batch

    def private(self) -> None: ...


class Parallel(Worker):
    """A worker with dp × tp × pp ranks, registered after construction, with tensor ranks fastest."""

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, dp: int, tp: int, pp: int) -> None:
        stage, rest = divmod(self.rank, dp * tp)
        dp_rank, tp_rank = divmod(rest, tp)
        self.register_mesh("train", dp_rank, dp, collects=stage == pp - 1 and tp_rank == 0)

    @register(Dispatch.ONE_TO_ALL)
    def init_rollout(self, tp: int) -> None:
        self.register_mesh("rollout", self.rank // tp, self.world_size // tp, self.rank % tp == 0)

    @register(Dispatch.MEGATRON_COMPUTE)
    def forward(self, batch: DataProto) -> DataProto:
        out = batch.select(["score"], ["uid"])
        nothing = DataProto({"score": torch.full((len(out),), torch.nan)}, out.non_tensor_batch)
        return out if self.meshes()["train"].collects else nothing

    @register(Dispatch.MEGATRON_COMPUTE_PROTO, mesh="train", blocking=False)
    def forward_later(self, batch: DataProto) -> DataProto:
        return self.forward(batch)

    @register(Dispatch.ND_COMPUTE_PROTO, mesh="rollout", blocking=False)
    def generate(self, batch: DataProto) -> DataProto:
        return DataProto({"rank": torch.full((len(batch),), self.rank)})

    @register(Dispatch.ND_COMPUTE_PROTO, mesh="rolout")
    def misspelt(self, batch: DataProto) -> DataProto:
        return batch


class Balancer(Worker):
    """A worker whose rows are divided by their number of tokens."""

    @register(balance="tokens", blocking=False)
    def score(self, batch: DataProto, scale: float = 1.0) -> DataProto:
        """Return each row's first token, the rank that processed it, and the work of that rank."""
        tokens = batch.ragged("tokens")
        first = [float(row[0]) if len(row) else -1.0 for row in tokens]
        columns = {"first": torch.tensor(first, dtype=torch.float64) * scale}
        columns |= {"rank": torch.full((len(batch),), self.rank)}
        columns |= {"load": torch.full((len(batch),), len(tokens.values))}
        return DataProto(columns, {"uid": batch.non_tensor_batch["uid"]})

    @register(balance="tokens")
    def add(self, batch: DataProto, other: DataProto) -> DataProto:
        """Add two batches that are divided in the same way."""
        return DataProto({"sum": batch.dense("score") + other.dense("score")})

    @register(balance="tokens", collect="first", blocking=False)
    def tokens_of_first(self, batch: DataProto) -> int:
        return len(batch.ragged("tokens").values)

    @register(balance="tokens")
    def drop(self, batch: DataProto) -> DataProto:
        return batch[:-1]

    @register(Dispatch.ND_COMPUTE_PROTO, balance="tokens")
    def meshed(self, batch: DataProto) -> DataProto:
        return batch.select(["score"], ["uid"])

    @register(Dispatch.ONE_TO_ALL)
    def init_mesh(self, tp: int) -> None:
        self.register_mesh("data", self.rank // tp, self.world_size // tp, self.rank % tp == 0)


class Streamer(Worker):
    """A worker that yields its samples in parts and in another order."""

    @register(stream=True)
    def stream(self, batch: DataProto, n: int = 1, size: int = 2) -> Iterator[Part]:
        """Yield n rows for each sample, the last ones first."""
        whole = batch.repeat(n).select(["score", "tokens"], ["uid"])
        whole = whole.union(DataProto({"rank": torch.full((len(whole),), self.rank)}))
        for rows in np.array_split(np.arange(len(whole))[::-1], -(-len(whole) // size) or 1):
            if len(rows):
                time.sleep(0.001 * self.rank)
                yield Part(rows.tolist(), whole[rows])

    @register(Dispatch.ND_COMPUTE_PROTO, stream=True)
    def stream_over_mesh(self, batch: DataProto) -> Iterator[Part]:
        yield from self.stream(batch)

    @register(stream=True)
    def stream_and_fail(self, batch: DataProto) -> Iterator[Part]:
        yield Part([0], batch[:1])
        if self.rank == 1:
            raise ValueError("broken in the middle")

    @register(stream=True)
    def stream_wrongly(self, batch: DataProto) -> Iterator[Part]:
        yield Part([0, 2], batch[:2])

    @register(blocking=False)
    def halve(self, batch: DataProto) -> DataProto:
        return DataProto({"half": batch.dense("score") / 2})

    @register(Dispatch.ONE_TO_ALL)
    def init_mesh(self, tp: int) -> None:
        self.register_mesh("data", self.rank // tp, self.world_size // tp, self.rank % tp == 0)


class Custom(Worker):
    @register((countdown, backwards), blocking=False)
    def place(self, number: int) -> tuple[int, int]:
        return self.rank, number

    @register((dispatch_batches, add_up))
    def count(self, batch: DataProto) -> int:
        return len(batch)
