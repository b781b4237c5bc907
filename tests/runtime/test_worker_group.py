import threading
import traceback

import pytest
import torch

from tandem.errors import ConfigError, DataError
from tandem.protocol import DataProto
from tandem.runtime import (
    BaseWorker,
    BatchFuture,
    Dispatch,
    Future,
    LocalBackend,
    Mesh,
    ResourcePool,
    Worker,
    WorkerGroup,
    register,
)
from tandem.runtime.dispatch import collect_first, dispatch_batches
from tests.runtime.multi_worker import assert_same, make_batch


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

    @register(Dispatch.ALL_TO_ALL)
    def own_item(self, item: str) -> str:
        return f"{item}{self.rank}"

    @register(Dispatch.DP_COMPUTE)
    def negate(self, items: list[int]) -> list[int]:
        return [-item for item in items]

    @register((dispatch_batches, lambda mesh, results: sum(results)))
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
    """dp × tp × pp, registered after construction, tensor ranks fastest."""

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
        place = self.meshes()["train"]
        return (
            out
            if place.collects
            else DataProto({"score": torch.full((len(out),), torch.nan)}, out.non_tensor_batch)
        )

    @register(Dispatch.ND_COMPUTE_PROTO, mesh="rollout", blocking=False)
    def generate(self, batch: DataProto) -> DataProto:
        return DataProto({"rank": torch.full((len(batch),), self.rank)})

    @register(Dispatch.ND_COMPUTE_PROTO, mesh="rolout")
    def misspelt(self, batch: DataProto) -> DataProto:
        return batch


def test_calls_on_four_workers(threads):
    group = WorkerGroup(threads, Toy, ResourcePool([2, 2]), 2.0)
    batch = make_batch(7)
    assert group.world_size == 4
    assert group.ranks() == [(rank, 4) for rank in range(4)]
    future = group.double(batch)
    assert isinstance(future, BatchFuture)
    assert torch.equal(future.get().dense("doubled"), batch.dense("score") * 2)
    history = group.history()
    assert isinstance(history, Future)
    assert history.get(timeout_s=5.0) == [[2], [2], [2], [1]]
    shifted = group.scores(batch, offset=1.0)
    assert torch.equal(shifted.dense("score"), batch.dense("score") + 1)
    assert list(shifted.non_tensor_batch["uid"]) == list(batch.non_tensor_batch["uid"])
    assert group.rows_of_rank_zero(batch) == 2
    assert group.nothing(batch) is None
    assert group.only_zero(1.5) == 1.5
    assert group.own_item(["a", "b", "c", "d"]) == ["a0", "b1", "c2", "d3"]
    assert group.negate([1, 2, 3]) == [-1, -2, -3]
    assert group.count(batch) == 7


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_fewer_rows_than_workers(threads, rows):
    group = WorkerGroup(threads, Toy, ResourcePool([4]), 2.0)
    batch = make_batch(rows)
    assert torch.equal(group.double(batch).get().dense("doubled"), batch.dense("score") * 2)
    assert len(group.double(batch).index) == rows


def test_groups_hand_futures_to_each_other(threads):
    first = WorkerGroup(threads, Toy, ResourcePool([4]), 2.0)
    second = WorkerGroup(threads, Toy, ResourcePool([3]), 5.0)
    batch = make_batch(11)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    scores = first.double(batch).union(batch).rows(order)
    doubled = second.double(scores.select("score"))
    both = doubled.rows(order.argsort()).get()
    assert torch.equal(both.dense("doubled"), batch.dense("score") * 5)
    mini = scores.split(4)
    assert [len(part) for part in mini] == [4, 4, 3]
    assert torch.equal(second.double(mini[1]).get().dense("doubled"), (batch[order].dense("score") * 5)[4:8])


def test_a_call_on_an_unfinished_future_returns_at_once(threads):
    gate = threading.Event()

    class Slow(Worker):
        @register(blocking=False)
        def step(self, batch: DataProto) -> DataProto:
            assert gate.wait(10)
            return batch.select(["score"], [])

    slow = WorkerGroup(threads, Slow, ResourcePool([2]))
    toy = WorkerGroup(threads, Toy, ResourcePool([3]), 3.0)
    batch = make_batch(5)
    chained = toy.double(slow.step(batch))
    # the controller is here, and nothing has run
    assert not any(handle.promise.done() for handle in threads.groups[0].handles + threads.groups[1].handles)
    gate.set()
    assert torch.equal(chained.get(timeout_s=10).dense("doubled"), batch.dense("score") * 3)


@pytest.mark.parametrize(("dp", "tp", "pp"), [(2, 2, 2), (1, 2, 2), (4, 1, 2), (2, 4, 1)])
def test_methods_over_named_meshes(threads, dp, tp, pp):
    group = WorkerGroup(threads, Parallel, ResourcePool([dp * tp * pp]))
    group.init_model(dp, tp, pp)
    batch = make_batch(5)
    assert_same(group.forward(batch), batch.select(["score"], ["uid"]))
    assert_same(group.forward(BatchFuture.of(batch)), batch.select(["score"], ["uid"]))
    group.init_rollout(2)
    shares = batch.chunk(group.world_size // 2)
    expected = [2 * i for i, share in enumerate(shares) for _ in range(len(share))]
    assert group.generate(batch).get().dense("rank").tolist() == expected


def test_mesh_names_that_cannot_be_resolved(threads):
    group = WorkerGroup(threads, Parallel, ResourcePool([2]))
    with pytest.raises(ConfigError, match="register_mesh call in every worker"):
        group.forward(make_batch(2))
    group.init_model(2, 1, 1)
    group.init_rollout(1)
    with pytest.raises(ConfigError, match=r"rolout\n.*\['rollout', 'train'\]"):
        group.misspelt(make_batch(2))
    with pytest.raises(ConfigError, match="not clear which mesh"):
        group.forward(make_batch(2))


def test_an_error_of_any_worker_is_raised(threads):
    group = WorkerGroup(threads, Toy, ResourcePool([3]), 1.0, fail_on=2)
    with pytest.raises(ValueError, match="broken on 2"):
        group.fail()
    with pytest.raises(ValueError, match="broken on 2"):
        group.fail_batch(make_batch(1))


def test_an_error_of_a_worker_that_does_not_collect_is_raised(threads):
    class Failing(Parallel):
        def forward(self, batch: DataProto) -> DataProto:
            if self.rank == 1:
                raise ValueError("tensor rank 1")
            return super().forward(batch)

    group = WorkerGroup(threads, Failing, ResourcePool([2]))
    group.init_model(1, 2, 1)
    with pytest.raises(ValueError, match="tensor rank 1"):
        group.forward(make_batch(2))


def test_local_backend_runs_here_and_keeps_the_traceback():
    group = WorkerGroup(LocalBackend(), Toy, ResourcePool([1]), 2.0, fail_on=0)
    batch = make_batch(3)
    assert group.ranks() == [(0, 1)]
    assert torch.equal(group.double(batch).get().dense("doubled"), batch.dense("score") * 2)
    assert len(group.double(group.double(batch).union(batch))) == 3
    assert group.history().get() == [[3, 3, 3]]
    with pytest.raises(ValueError, match="broken on 0") as error:
        group.fail()
    assert (
        traceback.extract_tb(error.value.__traceback__)[-1].line
        == 'raise ValueError(f"broken on {self.rank}")'
    )
    group.shutdown()


def test_local_worker_cannot_spoil_the_callers_batch():
    group = WorkerGroup(LocalBackend(), Toy, ResourcePool([1]), 2.0)
    batch = make_batch(3)
    group.scores(batch)
    group.scores(BatchFuture.of(batch))
    assert "tokens" in batch


def test_local_backend_refuses_more_than_one_process():
    with pytest.raises(ConfigError, match="a resource pool of 4 processes"):
        WorkerGroup(LocalBackend(), Toy, ResourcePool([2, 2]), 2.0)


def test_unregistered_names():
    group = WorkerGroup(LocalBackend(), Toy, ResourcePool([1]), 2.0)
    for name in ("private", "dubble", "_workers_"):
        with pytest.raises(AttributeError, match=name):
            getattr(group, name)
    assert "double" in dir(group)


def test_a_method_may_not_hide_one_of_the_groups_own():
    class Hiding(Worker):
        @register()
        def shutdown(self) -> None: ...

    with pytest.raises(ConfigError, match=r"Hiding\.shutdown"):
        WorkerGroup(LocalBackend(), Hiding, ResourcePool([1]))


def test_an_override_keeps_its_registration_unless_it_has_its_own():
    class Child(Toy):
        def only_zero(self, value: float) -> float:
            return 100 + value

        @register(Dispatch.ONE_TO_ALL)
        def count(self) -> int:
            return 7

    group = WorkerGroup(LocalBackend(), Child, ResourcePool([1]), 2.0)
    assert group.only_zero(1.0) == 101
    assert group.count() == [7]


def test_a_custom_pair_sees_the_mesh(threads):
    def reversed_ranks(mesh: Mesh, args, kwargs):
        return [((mesh.world_size - rank,), {}) for rank in range(mesh.world_size)]

    class Custom(BaseWorker):
        @register((reversed_ranks, lambda mesh, results: results[::-1]), blocking=False)
        def place(self, number: int) -> tuple[int, int]:
            return self.rank, number

        @register((dispatch_batches, collect_first))
        def share(self, batch: DataProto) -> int:
            return len(batch)

    group = WorkerGroup(threads, Custom, ResourcePool([3]))
    assert group.place().get() == [(2, 1), (1, 2), (0, 3)]
    assert group.share(make_batch(4)) == 2


def test_a_method_that_should_return_a_batch_and_does_not():
    class Wrong(Worker):
        @register()
        def update(self, batch: DataProto) -> dict[str, float]:
            return {"loss": 1.0}

    group = WorkerGroup(LocalBackend(), Wrong, ResourcePool([1]))
    with pytest.raises(DataError, match=r"Wrong\.update did not return a batch"):
        group.update(make_batch(1))


def test_a_worker_can_be_used_without_a_group():
    worker = Toy(3.0)
    assert (worker.rank, worker.world_size) == (0, 1)
    assert worker.negate([1]) == [-1]
