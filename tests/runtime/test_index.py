import pickle
import threading
from concurrent import futures as concurrent_futures

import numpy as np
import pytest
import torch

from tandem.errors import DataError
from tandem.protocol import DataProto, Ragged
from tandem.runtime import BatchFuture, Future, Index
from tandem.runtime.future import Done, resolve
from tests.runtime.multi_worker import ThreadHandle, assert_index_of, assert_same, make_batch


@pytest.mark.parametrize("rows", [slice(0, 8), slice(2, 5), [3, 3, 0], torch.arange(8) % 2 == 0, [], [-1]])
def test_rows(rows):
    batch = make_batch(8)
    index = Index.of(batch)[rows]
    assert_index_of(index, batch[rows])
    assert list(index.uids) == list(batch[rows].non_tensor_batch["uid"])
    assert index.row_ids.tolist() == np.arange(8)[rows if rows != [] else slice(0)].tolist()
    assert index.lengths["tokens"] is index.lengths["log_probs"] is not index.lengths["prompts"]


def test_select_keeps_the_samples_recognisable():
    future = BatchFuture.of(make_batch(4))
    index = future.select("prompts", "score").index
    assert (index.columns, list(index.lengths)) == (("prompts", "score"), ["prompts"])
    assert list(index.uids) == ["0-0", "0-0", "0-1", "0-1"]
    with pytest.raises(DataError, match="nothere"):
        _ = future.select("nothere").index


def test_union():
    batch = make_batch(5)
    left, right = batch.select(["tokens"], ["uid"]), batch.select(["log_probs", "score"], [])
    index = BatchFuture.of(right).union(left).index
    assert_index_of(index, right.union(left))
    assert index.lengths["tokens"] is index.lengths["log_probs"]
    future = BatchFuture.of(batch)
    other_lengths = DataProto({"tokens": Ragged.from_list([[1] * 7] * 5)})
    for other, said in (
        (make_batch(4), r"4 rows.*\n.*5 rows"),
        (future.rows([4, 3, 2, 1, 0]), "different samples"),
        (other_lengths, "tokens"),
    ):
        with pytest.raises(DataError, match=said):
            _ = future.union(other).index


def test_union_of_samples_whose_names_are_equal_whatever_they_are():
    def named(*uids):
        return BatchFuture.of(DataProto({"x": torch.zeros(len(uids))}, {"uid": list(uids)}))

    def odd():
        nan = float("nan")
        return named(nan, np.array([1, 2]), {"ids": np.arange(3), "share": nan})

    both = odd().union(odd())
    assert (len(both.index), both.index.columns) == (3, ("x", "uid"))
    for other in (named(np.array([1, 3])), named(np.array([1, 2, 3])), named("1")):
        with pytest.raises(DataError, match="different samples"):
            _ = named(np.array([1, 2])).union(other).index


def test_concat():
    parts = [make_batch(rows, seed=rows) for rows in (3, 0, 2)]
    future = BatchFuture.concat([*map(BatchFuture.of, parts)])
    assert_index_of(future.index, DataProto.concat(parts))
    assert future.index.row_ids.tolist() == [0, 1, 2, 3, 4]
    assert list(future.index.uids) == ["0-0", "0-0", "0-1", "0-0", "0-0"]
    with pytest.raises(DataError, match="different columns"):
        _ = BatchFuture.concat([future, future.select("tokens")]).index
    with pytest.raises(DataError, match="dict"):
        Index.of({"loss": 1.0})


@pytest.mark.parametrize(("rows", "n"), [(8, 1), (64, 8), (512, 1), (4096, 8)])
def test_an_index_is_small(rows, n):
    lengths = torch.randint(1, 2048, (rows,))
    values = Ragged.from_lengths(torch.zeros(int(lengths.sum()), dtype=torch.bool), lengths)
    prompts = Ragged.from_lengths(torch.zeros(70_000 * rows, dtype=torch.bool), [70_000] * rows)
    names = ("tokens", "response_mask", "rollout_log_probs", "policy_version")
    uids = np.array([f"0/{1234 + row // n}" for row in range(rows)], dtype=object)
    index = Index.of(DataProto({**dict.fromkeys(names, values), "prompts": prompts}, {"uid": uids}))
    length_bytes = (2 + 4) * rows  # two distinct length tensors, the second with lengths beyond two bytes
    assert len(pickle.dumps(index)) <= (64 if rows < 512 else 16) * rows + length_bytes


@pytest.mark.parametrize("uids", [True, False])
def test_an_index_survives_the_trip(uids):
    batch = make_batch(9, uids=uids)
    for rows in (slice(0, 9), slice(0, 0), [8, 0, 3]):
        index = Index.of(batch)[rows]
        back = pickle.loads(pickle.dumps(index))
        assert_index_of(back, batch[rows])
        assert torch.equal(back.row_ids, index.row_ids)
        assert back.columns == index.columns
        assert back.lengths["tokens"] is back.lengths["log_probs"]
        assert back.uids is None if not uids else list(back.uids) == list(index.uids)
    huge = Index(None, torch.tensor([2**40, 1]), {"t": torch.tensor([2**33, 0])}, ("t",))
    back = pickle.loads(pickle.dumps(huge))
    assert (back.row_ids.tolist(), back.lengths["t"].tolist()) == ([2**40, 1], [2**33, 0])


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
