import pickle
import threading
from concurrent import futures as concurrent_futures

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import DataError
from tandem.protocol import DataProto
from tandem.runtime import BatchFuture, Future
from tandem.runtime.future import Done, resolve
from tests.runtime.multi_worker import ThreadHandle, assert_same, make_batch


def parts_and_whole(sizes: list[int]) -> tuple[BatchFuture, DataProto]:
    parts = [make_batch(size, seed=i) for i, size in enumerate(sizes)]
    return BatchFuture.collected([Done(part) for part in parts], "W.m"), DataProto.concat(parts)


def promised() -> tuple[ThreadHandle, concurrent_futures.Future]:
    promise: concurrent_futures.Future = concurrent_futures.Future()
    return ThreadHandle(promise), promise


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("rows"), st.integers(0, 2**31)),
        st.tuples(st.just("chunk"), st.integers(1, 4)),
        st.tuples(st.just("split"), st.integers(1, 4)),
        st.tuples(st.just("union"), st.just(0)),
        st.tuples(st.just("select"), st.just(0)),
    ),
    max_size=5,
)


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4), operations=OPERATIONS)
@settings(max_examples=150, deadline=None)
def test_any_composition_does_to_the_future_what_it_does_to_the_batch(sizes, operations):
    future, batch = parts_and_whole(sizes)
    for name, argument in operations:
        if name == "rows":
            pick = torch.randint(
                0, max(len(batch), 1), (3,), generator=torch.Generator().manual_seed(argument)
            )
            pick = pick[: len(batch)]
            future, batch = future.rows(pick), batch[pick]
        elif name == "chunk":
            future, batch = future.chunk(argument)[-1], batch.chunk(argument)[-1]
        elif name == "split" and len(batch):
            assert len(future.split(argument)) == len(batch.split(argument))
            future, batch = future.split(argument)[-1], batch.split(argument)[-1]
        elif name == "union":
            extra = DataProto({f"extra{len(batch.columns)}": torch.arange(len(batch))})
            future, batch = future.union(extra), batch.union(extra)
        elif name == "select":
            keep = ["tokens", "uid", "score"]
            future, batch = future.select(*keep), batch.select(keep[:1] + keep[2:], ["uid"])
    assert_same(future.get(), batch)
    index = future.index
    assert len(index) == len(future) == len(batch)
    assert set(index.columns) == set(batch.columns)
    assert torch.equal(index.lengths["tokens"], batch.ragged("tokens").lengths)
    assert list(index.uids) == list(batch.non_tensor_batch["uid"])


def test_row_ids_name_the_row_in_the_batch_as_it_was_returned():
    future, _ = parts_and_whole([3, 4])
    assert future.rows([6, 0, 5, 2]).chunk(2)[1].index.row_ids.tolist() == [5, 2]


def test_order_is_restored_by_the_inverse_permutation():
    future, whole = parts_and_whole([3, 4])
    order = torch.tensor([6, 2, 0, 5, 1, 3, 4])
    assert_same(future.rows(order).rows(order.argsort()).get(), whole)


def test_composing_needs_no_value_and_the_index_moves_none():
    handle, promise = promised()
    future = BatchFuture.collected([handle], "W.m")
    view = future.select("tokens", "uid").rows([2, 1]).union(future.select("score").rows([2, 1])).chunk(2)[0]
    batch = make_batch(4)
    promise.set_result(batch)
    assert len(view) == 1
    assert view.index.columns == ("tokens", "uid", "score")
    assert handle.values_moved == 0
    assert_same(view.get(), batch.select(["tokens", "score"], ["uid"])[[2]])
    assert handle.values_moved == 1


def test_index_of_an_unfinished_future_waits():
    handle, promise = promised()
    future = BatchFuture.collected([handle], "W.m")
    timer = threading.Timer(0.05, promise.set_result, [make_batch(3)])
    timer.start()
    assert len(future.index) == 3
    timer.join()


def test_get_gives_up_after_its_limit():
    with pytest.raises(TimeoutError):
        BatchFuture.collected([promised()[0]], "W.m").get(timeout_s=0.01)
    with pytest.raises(TimeoutError):
        Future([promised()[0]], list).get(timeout_s=0.01)


def test_one_limit_is_shared_by_all_waits():
    class Recording(Done):
        def get(self, timeout_s=None):
            limits.append(timeout_s)
            threading.Event().wait(0.02)
            return self.value

    limits: list[float] = []
    Future([Recording(1), Recording(2)], list).get(timeout_s=10.0)
    assert 9.9 < limits[0] <= 10.0
    assert limits[1] <= limits[0] - 0.02


def test_plain_future_collects_in_order_of_rank():
    assert Future([Done(3), None, Done(4)], lambda results: results).get() == [3, None, 4]


def test_what_is_got_belongs_to_the_caller():
    batch, same = make_batch(3), make_batch(3)
    future = BatchFuture.of(batch)
    future.get().pop(["tokens"])
    resolve(batch).pop(["tokens"])
    resolve(batch, borrowed=True).dense("score").add_(1)
    assert_same(future.get(), same)
    assert "tokens" in batch
    with pytest.raises(DataError, match="no columns"):
        future.select()


def test_select_of_a_missing_column_and_rows_beyond_the_end():
    future, _ = parts_and_whole([3])
    for wait in (lambda f: f.index, lambda f: f.get()):
        with pytest.raises(DataError, match="nothere"):
            wait(future.select("nothere"))
        with pytest.raises(IndexError, match="3"):
            wait(future.rows([3]))
    with pytest.raises(DataError, match="chunks"):
        future.chunk(0)
    with pytest.raises(DataError, match="size"):
        future.split(0)


def test_an_empty_share_may_come_back_without_columns():
    batch = make_batch(3)
    future = BatchFuture.collected([Done(DataProto()), Done(batch), Done(DataProto())], "W.m")
    assert_same(future.get(), batch)
    assert len(future.index) == 3
    assert len(BatchFuture.collected([Done(DataProto())] * 2, "W.m").get()) == 0


def test_a_method_that_returned_no_batch():
    with pytest.raises(DataError, match=r"Actor\.update did not return a batch\n.*dict"):
        BatchFuture.collected([Done({"loss": 1.0})], "Actor.update").get()


def test_resolve():
    batch = make_batch(2)
    assert_same(resolve(BatchFuture.of(batch)), batch)
    assert resolve(Future([Done(5)], sum)) == 5
    assert resolve("as it is") == "as it is"


def test_a_future_survives_the_trip_to_another_process():
    future, whole = parts_and_whole([2, 3])
    view = future.rows([4, 0, 1]).select("tokens", "score", "uid").chunk(2)[0]
    expected = whole[[4, 0, 1]].select(["tokens", "score"], ["uid"]).chunk(2)[0]
    assert_same(pickle.loads(pickle.dumps(view)).get(), expected)
