import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.balance import partition
from tandem.errors import DataError
from tandem.protocol import DataProto, Ragged
from tandem.runtime import BatchFuture, Index
from tandem.runtime.expression import sources
from tandem.runtime.future import division
from tests.runtime.multi_worker import STORE, StoredHandle, assert_same, make_batch


def stored(parts: list[DataProto], borrowed: bool = False) -> tuple[BatchFuture, list[StoredHandle]]:
    handles = [StoredHandle(part, borrowed) for part in parts]
    return BatchFuture.collected(handles, "W.m"), handles


def unmade(parts: list[DataProto], shares: object = None) -> tuple[BatchFuture, list[StoredHandle]]:
    """Return a future of methods that have not ended."""
    handles = [StoredHandle(None) for _ in parts]
    return BatchFuture.collected(handles, "W.m", shares), handles


def make(handles: list[StoredHandle], parts: list[DataProto]) -> None:
    for handle, part in zip(handles, parts, strict=True):
        STORE[handle.key] = part


def named(future: BatchFuture) -> set[int]:
    """Return the results that a future's expression mentions."""
    return {source.handle.key for source in sources(future._node)}


def there_and_back(future: BatchFuture) -> BatchFuture:
    return pickle.loads(pickle.dumps(future))


def apply(future: BatchFuture, batch: DataProto, name: str, number: int) -> tuple[BatchFuture, DataProto]:
    """Apply one operation to a future and to its batch."""
    generator = torch.Generator().manual_seed(number)
    if name == "rows":
        pick = torch.randint(0, max(len(batch), 1), (min(4, len(batch)),), generator=generator)
        return future.rows(pick), batch[pick]
    if name == "mask":
        mask = torch.rand(len(batch), generator=generator) < 0.7
        return future.rows(mask), batch[mask]
    if name == "order":
        pick = torch.randperm(len(batch), generator=generator)
        return future.rows(pick), batch[pick]
    if name == "slice":
        span = slice(number % 3, 1 + number % 7)
        return future.rows(span), batch[span]
    if name == "chunk":
        n = 1 + number % 4
        return future.chunk(n)[number % n], batch.chunk(n)[number % n]
    if name == "balanced":
        n = 1 + number % 3
        rows = partition(batch.ragged("tokens").lengths.tolist(), n)[number % n]
        return future.chunk(n, balance="tokens")[number % n], batch[rows]
    if name == "union":
        extra = DataProto({f"extra{len(batch.columns)}": torch.arange(len(batch))})
        return future.union(extra), batch.union(extra)
    if name == "itself":
        return future.union(future.select("tokens", "uid")), batch
    if name == "concat":
        return BatchFuture.concat([future, future.rows(slice(0, 2))]), DataProto.concat([batch, batch[:2]])
    keep = ["tokens", "score"]
    return future.select(*keep, "uid"), batch.select(keep, ["uid"])


NAMES = ["rows", "mask", "order", "slice", "chunk", "balanced", "union", "itself", "concat", "select"]
OPERATIONS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 999)), max_size=6)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), OPERATIONS, st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_composition_does_to_the_future_what_it_does_to_the_batch(sizes, operations, ended, borrowed):
    parts = [make_batch(size, seed=i) for i, size in enumerate(sizes)]
    for part in parts:
        part.non_tensor_batch["uid"] = np.array([f"{id(part)}/{i}" for i in range(len(part))], dtype=object)
    future, handles = stored(parts, borrowed) if ended else unmade(parts)
    batch = DataProto.concat(parts)
    for name, number in operations:
        future, batch = apply(future, batch, name, number)
    make(handles, parts)
    for handle in handles:
        handle.moved()
    assert_same(there_and_back(future).get(), batch)
    assert all(handle.moved() <= 1 for handle in handles)
    index = future.index
    assert all(handle.moved() == 0 for handle in handles)
    assert (len(index), set(index.columns)) == (len(batch), set(batch.columns))
    assert torch.equal(index.lengths["tokens"], batch.ragged("tokens").lengths)
    assert list(index.uids) == list(batch.non_tensor_batch["uid"])


@pytest.mark.parametrize("ended", [True, False])
def test_only_results_that_hold_wanted_rows_and_columns_are_fetched(ended):
    left = [make_batch(3, seed=i) for i in range(4)]
    right = [DataProto({"value": torch.arange(i, i + 6.0)}) for i in (0, 6)]
    (a, left_handles), (b, right_handles) = [
        stored(parts) if ended else unmade(parts) for parts in (left, right)
    ]
    chunk = a.union(b).chunk(4)[1]
    chosen = a.union(b).rows([7, 6, 1]).select("score")
    values = a.union(b).select("value").chunk(2)[1]
    make(left_handles, left)
    make(right_handles, right)
    whole = DataProto.concat(left).union(DataProto.concat(right))

    def fetched():
        return [h.moved() for h in left_handles], [h.moved() for h in right_handles]

    assert_same(chunk.get(), whole.chunk(4)[1])
    assert fetched() == ([0, 1, 0, 0], [1, 0])
    assert_same(chosen.get(), whole[[7, 6, 1]].select(["score"], []))
    assert fetched() == ([1, 0, 1, 0], [0, 0])
    assert_same(values.get(), whole.select(["value"], [])[6:])
    assert fetched() == ([0, 0, 0, 0], [0, 1])
    assert len(a.union(b).index) == 12
    assert fetched() == ([0, 0, 0, 0], [0, 0])


def test_successive_rows_of_one_result_are_views_and_others_one_copy():
    parts = [make_batch(4, seed=i) for i in range(2)]
    future, _ = stored(parts)
    view = future.chunk(4)[2].get()
    assert view.dense("score").data_ptr() == parts[1].dense("score").data_ptr()
    assert view.ragged("prompts").values.data_ptr() == parts[1].ragged("prompts").values.data_ptr()
    copied = future.rows([0, 5]).get()
    copied.dense("score")[:] = 7
    assert 7 not in parts[0].dense("score").tolist() + parts[1].dense("score").tolist()


@pytest.mark.parametrize("pick", [slice(0, 8), slice(1, 3), [4, 0], [6, 7]])
def test_what_was_borrowed_is_given_as_memory_of_its_own(pick):
    parts = [make_batch(4, seed=i) for i in range(2)]
    expected = DataProto.concat(parts).clone()
    for future in (stored(parts, borrowed=True)[0], stored(parts[:1], borrowed=True)[0]):
        if max(range(8)[pick] if isinstance(pick, slice) else pick) >= len(future):
            continue
        got = future.rows(pick).get()
        for column in got.batch.values():
            tensors = (column.values, column.offsets) if isinstance(column, Ragged) else (column,)
            for tensor in tensors:
                tensor.zero_()
        assert_same(DataProto.concat(parts), expected)


def test_a_value_that_travelled_is_not_written_to():
    data = []
    batch = make_batch(3)
    pickled = pickle.dumps(BatchFuture.of(batch), protocol=5, buffer_callback=data.append)
    memory = [bytes(buffer.raw()) for buffer in data]
    before = [bytearray(block) for block in memory]
    pickle.loads(pickled, buffers=memory).get().dense("score").fill_(3.0)
    assert memory == before


def test_a_share_mentions_only_its_own_results():
    ranks, stream_parts = 32, 8
    parts = [make_batch(4, seed=i) for i in range(ranks * stream_parts)]
    future, handles = stored(parts)
    scored, score_handles = stored([DataProto({"reward": torch.zeros(32)}) for _ in range(ranks)])
    batch = future.union(scored)
    shares = batch.chunk(ranks)
    keys = [handle.key for handle in handles]
    for rank, share in enumerate(shares):
        own = set(keys[rank * stream_parts : (rank + 1) * stream_parts]) | {score_handles[rank].key}
        assert named(share) == own
        assert len(pickle.dumps(share)) < 2000
    order = torch.randperm(len(batch))
    mini = batch.rows(order).split(64)[3]
    for share, rows in zip(mini.chunk(8), order[192:256].chunk(8), strict=True):
        own = {keys[row // 4] for row in rows.tolist()} | {score_handles[r // 32].key for r in rows.tolist()}
        assert named(share) == own
    before = sum(StoredHandle.asked.values())
    assert len(mini.chunk(8)[5].index) == 8
    assert_same(there_and_back(shares[3]).get(), batch.get()[96:128])
    assert sum(StoredHandle.asked.values()) == before  # the share carries the sizes


def test_rows_of_what_is_not_there_yet_are_numbers_at_once():
    parts = [make_batch(512, seed=1)]
    future, handles = unmade(parts)
    order = torch.randperm(512)
    shares = future.rows(order).rows(slice(0, 256)).chunk(8)
    assert all(len(pickle.dumps(share)) < 32 * 4 + 600 for share in shares)
    assert sum(StoredHandle.asked[handle.key] for handle in handles) == 0
    make(handles, parts)
    assert_same(shares[1].get(), parts[0][order[32:64]])


def test_the_controllers_own_rows_travel_alone():
    batch = DataProto({"x": torch.arange(100_000.0)}, {"uid": [str(i) for i in range(100_000)]})
    share = BatchFuture.of(batch).union(DataProto({"y": torch.zeros(100_000)})).chunk(100)[7]
    assert len(pickle.dumps(share.select("x", "y"))) < 1000 * 8 + 1500
    assert_same(there_and_back(share).select("x").get(), batch[7000:8000].select(["x"], []))


def test_a_column_on_both_sides_of_a_union_must_agree():
    batch = make_batch(6)
    first, _ = stored(batch.chunk(2))
    second, handles = stored(batch.clone().chunk(3))
    assert_same(first.union(second).rows([4, 1]).get(), batch[[4, 1]])
    assert sum(handle.moved() for handle in handles) == 2
    wrong = batch.clone()
    wrong.dense("score")[5] += 1
    other, _ = stored(wrong.chunk(3))
    assert len(first.union(other).chunk(2)[0].get()) == 3
    with pytest.raises(DataError, match="score"):
        first.union(other).chunk(2)[1].get()
    with pytest.raises(DataError, match="score"):
        BatchFuture.concat([first, first.union(other)]).get()
    with pytest.raises(DataError, match="different size"):
        first.union(stored([batch[:4].select(["score"])])[0]).get()


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("rows", [0, 2, 13])
def test_balanced_shares(ended, rows):
    batch = make_batch(rows, seed=3)
    parts = batch.chunk(3)
    future, handles = stored(parts) if ended else unmade(parts)
    shares = future.chunk(4, balance="tokens")
    assert ended or sum(StoredHandle.asked[handle.key] for handle in handles) == 0
    make(handles, parts)
    expected = partition(batch.ragged("tokens").lengths.tolist(), 4)
    for share, numbers in zip(shares, expected, strict=True):
        assert_same(there_and_back(share).get(), batch[numbers])


def test_balanced_by_a_column_that_is_not_there():
    future, handles = unmade([make_batch(4)])
    share = future.chunk(2, balance="nothere")[0]
    make(handles, [make_batch(4)])
    for wait in (share.get, lambda: future.chunk(2, balance="score")):
        with pytest.raises(DataError, match="no batch has the ragged column"):
            wait()


@pytest.mark.parametrize("ended", [True, False])
def test_results_of_a_division_come_back_in_order(ended):
    batch = make_batch(11, seed=4)
    given_, handles = stored([batch]) if ended else unmade([batch])
    shares = division([given_], 3, "tokens")
    parts = [
        batch[rows].select(["score"], []) for rows in partition(batch.ragged("tokens").lengths.tolist(), 3)
    ]
    result, result_handles = unmade(parts, shares)
    chained = there_and_back(result.union(given_.select("uid"))).chunk(2)
    make(handles, [batch])
    make(result_handles, parts)
    assert_same(result.get(), batch.select(["score"], []))
    assert result.index.row_ids.tolist() == list(range(11))
    for half, expected in zip(chained, batch.chunk(2), strict=True):
        assert_same(half.get(), expected.select(["score"], ["uid"]))
    make(result_handles, [parts[0], parts[1][:1], parts[2]])
    with pytest.raises(DataError, match="the result of share 1"):
        BatchFuture.collected(result_handles, "W.m", shares).get()


def test_meta_info_of_batches_without_columns():
    future, _ = stored([DataProto(meta_info={"loss": 1.5})])
    assert future.get().meta_info == {"loss": 1.5}
    assert len(future) == 0
    both = future.union(DataProto({"x": torch.zeros(2)}, meta_info={"k": 2}))
    assert both.get().meta_info == {"loss": 1.5, "k": 2}
    assert len(both.index) == 2


@pytest.mark.parametrize("ended", [True, False])
def test_conflicting_meta_info_of_batches_without_columns_is_refused(ended):
    def both(*metas):
        parts = [DataProto(meta_info=meta) for meta in metas]
        future, handles = stored(parts) if ended else unmade(parts)
        make(handles, parts)
        return there_and_back(future)

    agreed = both({"loss": 1.5}, {"loss": 1.5, "lr": 0.1}, {})
    assert agreed.get().meta_info == {"loss": 1.5, "lr": 0.1}
    assert (len(agreed), agreed.index.columns) == (0, ())
    batch = DataProto({"x": torch.zeros(2)})
    joined = BatchFuture.concat([both({"a": 1}).union(batch), both({"b": 2}).union(batch)])
    assert joined.chunk(4)[3].get().meta_info == {"a": 1, "b": 2}
    for conflicting in (
        both({"loss": 1.5}, {"loss": 2.5}),
        BatchFuture.concat([both({"loss": loss}).union(batch) for loss in (1.5, 2.5)]).rows([3]),
    ):
        with pytest.raises(DataError, match="different values under one name") as refused:
            conflicting.get()
        assert refused.value.field == "loss"


def test_one_limit_for_all_sources():
    class Slow(StoredHandle):
        def get(self, timeout_s=None):
            limits.append(timeout_s)
            threading.Event().wait(0.02)
            return super().get()

    limits: list[float] = []
    handles = [Slow(make_batch(1, seed=i)) for i in range(2)]
    BatchFuture.collected(handles, "W.m").get(timeout_s=5.0)
    assert 4 < limits[1] <= limits[0] - 0.02 < 5


def test_traffic_of_a_step_at_the_controller():
    """The traffic consists of indices and arguments, for 4,096 samples of 2,000 tokens on eight ranks."""
    rows, ranks, uids = 4096, 8, [f"12/{row // 8}" for row in range(4096)]
    lengths = torch.randint(1, 4096, (rows,), generator=torch.Generator().manual_seed(0))
    table = Ragged.from_lengths(torch.zeros(int(lengths.sum()), dtype=torch.bool), lengths)
    batch = DataProto({"tokens": table, "mask": table}, {"uid": uids})
    parts = batch.chunk(ranks)
    indices = sum(len(pickle.dumps(Index.of(part))) for part in parts)
    length_bytes = 2 * rows
    assert indices <= 20 * rows + length_bytes
    future, _ = stored(parts)
    balanced = sum(len(pickle.dumps(share)) for share in future.chunk(ranks, balance="tokens"))
    shuffled = future.rows(torch.randperm(rows))
    minis = sum(len(pickle.dumps(s)) for m in shuffled.split(256) for s in m.chunk(ranks))
    assert balanced <= 10 * rows
    assert minis <= 40 * rows
    assert indices + balanced + minis <= 64 * rows + length_bytes
