import threading
from concurrent import futures as concurrent_futures

import pytest

from tandem.errors import DataError
from tandem.protocol import DataProto
from tandem.runtime import BatchFuture, Future
from tandem.runtime.future import Done, resolve
from tests.runtime.multi_worker import ThreadHandle, assert_same, make_batch


def promised():
    promise: concurrent_futures.Future = concurrent_futures.Future()
    return ThreadHandle(promise), promise


def test_composing_needs_no_value_and_the_index_moves_none():
    handle, promise = promised()
    future = BatchFuture.collected([handle], "W.m")
    view = future.select("tokens", "uid").rows([2, 1]).union(future.select("score").rows([2, 1])).chunk(2)[0]
    batch = make_batch(4)
    promise.set_result(batch)
    assert (len(view), view.index.columns) == (1, ("tokens", "uid", "score"))
    assert view.index.row_ids.tolist() == [2]
    assert handle.values_moved == 0
    assert_same(view.get(), batch.select(["tokens", "score"], ["uid"])[[2]])
    assert handle.values_moved == 1


def test_get_gives_up_after_its_limit_and_an_index_waits():
    for future in (BatchFuture.collected([promised()[0]], "W.m"), Future([promised()[0]], list)):
        with pytest.raises(TimeoutError):
            future.get(timeout_s=0.01)
    handle, promise = promised()
    threading.Timer(0.05, promise.set_result, [make_batch(3)]).start()
    assert len(BatchFuture.collected([handle], "W.m").index) == 3


@pytest.mark.parametrize("kind", [Future, BatchFuture])
def test_one_limit_is_shared_by_all_waits(kind):
    class Recording(Done):
        def get(self, timeout_s=None):
            limits.append(timeout_s)
            threading.Event().wait(0.02)
            return self.value

    limits: list[float] = []
    handles = [Recording(make_batch(1, seed=seed)) for seed in (1, 2)]
    future = Future(handles, list) if kind is Future else BatchFuture.collected(handles, "W.m")
    future.get(timeout_s=10.0)
    assert 9 < limits[0] <= 10.0 and limits[1] <= limits[0] - 0.02


def test_resolve_and_a_plain_future_in_order_of_rank():
    assert Future([Done(3), None, Done(4)], lambda results: results).get() == [3, None, 4]
    batch = make_batch(2)
    assert_same(resolve(BatchFuture.of(batch)), batch)
    assert resolve(Future([Done(5)], sum)) == 5
    assert resolve("as it is") == "as it is"


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
    future = BatchFuture.collected([Done(make_batch(3))], "W.m")
    for wait in (lambda f: f.index, lambda f: f.get()):
        with pytest.raises(DataError, match="nothere"):
            wait(future.select("nothere"))
        with pytest.raises(IndexError, match="3"):
            wait(future.rows([3]))
    for wrong, said in ((future.chunk, "chunks"), (future.split, "size")):
        with pytest.raises(DataError, match=said):
            wrong(0)


def test_an_empty_share_may_come_back_without_columns():
    batch = make_batch(3)
    future = BatchFuture.collected([Done(DataProto()), Done(batch), Done(DataProto())], "W.m")
    assert_same(future.get(), batch)
    assert len(future.index) == 3
    assert len(BatchFuture.collected([Done(DataProto())] * 2, "W.m").get()) == 0
    with pytest.raises(DataError, match=r"Actor\.update did not return a batch\n.*dict"):
        BatchFuture.collected([Done({"loss": 1.0})], "Actor.update").get()
