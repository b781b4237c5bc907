import functools
import threading
import traceback
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tandem.errors import ConfigError, DataError
from tandem.protocol import DataProto
from tandem.runtime import (
    BaseWorker,
    BatchFuture,
    Dispatch,
    LocalBackend,
    Part,
    ResourcePool,
    Worker,
    WorkerGroup,
    register,
)
from tandem.runtime.dispatch import collect_first, dispatch_batches
from tandem.runtime.worker import create, registrations, worker_class
from tests.runtime.multi_worker import make_batch
from tests.support import toys
from tests.support.toys import Balancer, Parallel, Streamer, Toy


@pytest.fixture
def gate():
    return threading.Event()


@pytest.fixture
def slow(threads, gate):
    class Slow(Worker):
        @register(blocking=False)
        def step(self, batch: DataProto, rows: int | None = None) -> DataProto:
            assert gate.wait(10)
            return batch[:rows]

    return WorkerGroup(threads, Slow, ResourcePool([2]))


def local(worker, **options):
    return WorkerGroup(LocalBackend(), worker, ResourcePool([1]), **options)


def test_mesh_names_that_cannot_be_resolved(threads):
    group = WorkerGroup(threads, Parallel, ResourcePool([2]))
    with pytest.raises(ConfigError, match="register_mesh call in every worker"):
        group.forward(make_batch(2))
    group.init_model(2, 1, 1)
    group.init_rollout(1)
    with pytest.raises(ConfigError, match=r"rolout\n.*\['rollout', 'train'\]"):
        group.misspelt(make_batch(2))
    with pytest.raises(ConfigError, match="the mesh is not clear"):
        group.forward(make_batch(2))


def test_an_error_of_any_worker_is_raised(threads):
    group = WorkerGroup(threads, partial(Toy, 1.0, fail_on=2), ResourcePool([3]))
    for call in (group.fail, lambda: group.fail_batch(make_batch(1))):
        with pytest.raises(ValueError, match="broken on 2"):
            call()

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
    group, batch = local(partial(Toy, 2.0, fail_on=0)), make_batch(3)
    doubled = group.double(batch)
    assert torch.equal(doubled.get().dense("doubled"), batch.dense("score") * 2)
    assert len(group.double(doubled.union(batch))) == 3
    assert (group.ranks(), group.history().get()) == ([(0, 1)], [[3, 3]])
    group.scores(batch)  # this removes a column from its own copy
    group.scores(BatchFuture.of(batch))
    assert "tokens" in batch
    with pytest.raises(ValueError, match="broken on 0") as error:
        group.fail()
    last = traceback.extract_tb(error.value.__traceback__)[-1]
    assert (last.filename, last.name) == (toys.__file__, "fail")
    stream = local(Streamer).stream(make_batch(5))
    assert torch.equal(stream.all().get().dense("score"), make_batch(5).dense("score"))
    group.shutdown()


def test_what_a_group_refuses():
    class Wrong(Worker):
        @register()
        def update(self, batch: DataProto) -> dict[str, float]:
            return {"loss": 1.0}

    class Hiding(Worker):
        @register()
        def shutdown(self) -> None: ...

    group = local(partial(Toy, 2.0))
    for name in ("private", "dubble", "_workers_"):
        with pytest.raises(AttributeError, match=name):
            getattr(group, name)
    assert "double" in dir(group)
    with pytest.raises(ConfigError, match="4 processes"):
        WorkerGroup(LocalBackend(), partial(Toy, 2.0), ResourcePool([2, 2]))
    with pytest.raises(ConfigError, match=r"Hiding\.shutdown"):
        local(Hiding)
    with pytest.raises(DataError, match=r"Wrong\.update"):
        local(Wrong).update(make_batch(1))


def test_an_override_keeps_its_registration_unless_it_has_its_own():
    class Child(Toy):
        def only_zero(self, value: float) -> float:
            return 100 + value

        @register(Dispatch.ONE_TO_ALL)
        def count(self) -> int:
            return 7

    group = local(partial(Child, 2.0))
    assert group.only_zero(1.0) == 101
    assert group.count() == [7]


def test_a_function_is_registered_once():
    @register(blocking=False)
    def double(self: Worker, batch: DataProto) -> DataProto:
        return batch

    with pytest.raises(ConfigError) as refused:
        register(Dispatch.ONE_TO_ALL)(double)
    assert "double" in str(refused.value.field)

    @register(Dispatch.RANK_ZERO)
    @functools.wraps(double)
    def wrapped(self: Worker, batch: DataProto) -> DataProto:
        return double(self, batch)

    both = type("Both", (Worker,), {"first": double, "second": wrapped})
    modes = [registration.dispatch_mode for registration in registrations(both).values()]
    assert modes == [Dispatch.DP_COMPUTE_PROTO, Dispatch.RANK_ZERO]


def test_a_custom_pair_sees_the_mesh(threads):
    class Custom(BaseWorker):
        @register((dispatch_batches, collect_first))
        def share(self, batch: DataProto) -> int:
            return len(batch)

    assert WorkerGroup(threads, Custom, ResourcePool([3])).share(make_batch(4)) == 2


def test_errors_of_a_stream_are_raised_wherever_it_is_read(threads):
    stream, seen = WorkerGroup(threads, Streamer, ResourcePool([3])).stream_and_fail(make_batch(3)), []
    reads = [lambda: stream.map(lambda part: seen.append(len(part)) or part)] * 2  # the second reads again
    for read in [*reads, stream.all]:
        with pytest.raises(ValueError, match="broken in the middle"):
            read()
    assert seen == [1] * 6


def test_parts_are_handed_on_before_the_stream_has_ended(threads, gate):
    class Gated(Worker):
        @register(stream=True)
        def parts(self, batch: DataProto) -> Iterator[Part]:
            yield Part([1], batch[1:])
            assert gate.wait(10)
            yield Part([0], batch[:1])

        @register(blocking=False)
        def score(self, batch: DataProto) -> DataProto:
            gate.set()
            return DataProto({"twice": batch.dense("score") * 2})

    gated, scorer = (WorkerGroup(threads, Gated, ResourcePool([1])) for _ in range(2))
    batch = make_batch(2)
    out = gated.parts(batch).map(lambda part: part.union(scorer.score(part)))
    assert torch.equal(out.get(timeout_s=10).dense("twice"), batch.dense("score") * 2)


def test_no_call_waits_for_an_input(threads, slow, gate):
    balancer = WorkerGroup(threads, Balancer, ResourcePool([3]), balance=True)
    toy = WorkerGroup(threads, partial(Toy, 3.0), ResourcePool([3]))
    batch = make_batch(7)
    made = slow.step(batch)
    doubled = toy.double(made)
    scored = made.union(balancer.score(made)).select("first", "score")
    halves = [half.rows([0, 1]) for half in scored.chunk(2)]
    first = balancer.tokens_of_first(made)
    assert not any(handle.promise.done() for group in threads.groups for handle in group.handles)
    gate.set()
    assert torch.equal(doubled.get(timeout_s=10).dense("doubled"), batch.dense("score") * 3)
    assert torch.equal(halves[1].get(timeout_s=10).dense("score"), batch.dense("score")[4:6])
    assert first.get(timeout_s=10) > 0


def test_batches_of_different_sizes_are_refused_as_far_as_they_are_known(threads, slow, gate):
    balancer = WorkerGroup(threads, Balancer, ResourcePool([2]), balance=True)
    batch = make_batch(6)
    for other in (batch[:5], BatchFuture.of(batch[:5])):
        with pytest.raises(DataError, match=r"6 rows.*5 rows"):
            balancer.add(batch, other)
    later = slow.step(batch, rows=2)
    threading.Timer(0.05, gate.set).start()
    with pytest.raises(DataError, match="number of rows"):
        balancer.add(batch, later)


@pytest.mark.parametrize(
    "options",
    [
        {"dispatch_mode": Dispatch.ONE_TO_ALL, "balance": "tokens"},
        {"dispatch_mode": Dispatch.RANK_ZERO, "stream": True},
        *({"collect": "first", "stream": True}, {"balance": "tokens", "stream": True}),
    ],
)
def test_options_that_do_not_go_together(options):
    with pytest.raises(ConfigError):
        register(**options)(lambda self: None)


def test_roles_and_what_a_factory_makes(capsys):
    class Telling(Worker):
        def __init__(self, name: str, *, end: str) -> None:
            self.tell(f"{name}{self.rank}{end}")

        @register(Dispatch.ONE_TO_ALL)
        def again(self) -> None:
            self.tell("again")

    factory = partial(Telling, "I am ", end=".")
    assert local(factory).role == "Telling"
    group = local(factory, role="actor")
    group.again()
    assert group.role == "actor"
    assert capsys.readouterr().out == "I am 0.\nI am 0.\nagain\n"
    told = []
    create(factory, 3, 4, tell=told.append)
    assert told == ["I am 3."]
    assert worker_class(factory) is worker_class(Telling) is Telling
    for wrong in (dict, partial(dict), factory()):
        with pytest.raises(ConfigError, match="not a worker"):
            worker_class(wrong)
