import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.balance import partition
from tandem.errors import DataError
from tandem.protocol import DataProto, Ragged
from tandem.runtime import BatchFuture
from tandem.runtime.expression import sources
from tandem.runtime.future import division
from tests.runtime.multi_worker import STORE, StoredHandle, assert_index_of, assert_same, make_batch


def stored(parts, shares=None, *, borrowed=False):
    handles = [StoredHandle(part, borrowed) for part in parts]
    return BatchFuture.collected(handles, "W.m", shares), handles


def unmade(parts, shares=None):
    return stored([None] * len(parts), shares)


def make(handles, parts):
    for handle, part in zip(handles, parts, strict=True):
        STORE[handle.key] = part


def named(future):
    return {source.handle.key for source in sources(future._node)}


def asked(handles):
    return sum(StoredHandle.asked[handle.key] for handle in handles)


both_states = pytest.mark.parametrize("future_of", [stored, unmade])
"""With results that exist, and with those of methods that have not ended."""


def there_and_back(future):
    return pickle.loads(pickle.dumps(future))


def apply(future, batch, name, number):
    generator, count = torch.Generator().manual_seed(number), len(batch)
    picks = {
        "rows": torch.randint(0, max(count, 1), (min(4, count),), generator=generator),
        "mask": torch.rand(count, generator=generator) < 0.7,
        "order": torch.randperm(count, generator=generator),
        "slice": slice(number % 3, 1 + number % 7),
    }
    if name in picks:
        return future.rows(picks[name]), batch[picks[name]]
    n = 1 + number % 4
    if name == "chunk":
        return future.chunk(n)[number % n], batch.chunk(n)[number % n]
    if name == "split":
        assert not count or len(future.split(n)) == len(batch.split(n))
        return (future.split(n)[-1], batch.split(n)[-1]) if count else (future, batch)
    if name == "balanced":
        rows = partition(batch.ragged("tokens").lengths.tolist(), n)[number % n]
        return future.chunk(n, balance="tokens")[number % n], batch[rows]
    if name == "union":
        extra = DataProto({f"extra{len(batch.columns)}": torch.arange(count)})
        return future.union(extra), batch.union(extra)
    if name == "itself":
        return future.union(future.select("tokens", "uid")), batch
    if name == "concat":
        return BatchFuture.concat([future, future.rows(slice(0, 2))]), DataProto.concat([batch, batch[:2]])
    return future.select("tokens", "score", "uid"), batch.select(["tokens", "score"], ["uid"])


NAMES = [
    "rows",
    "mask",
    "order",
    "slice",
    "chunk",
    "split",
    "balanced",
    "union",
    "itself",
    "concat",
    "select",
]
OPERATIONS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 999)), max_size=6)


STATES = st.sampled_from(["", "ended", "borrowed"])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), OPERATIONS, STATES)
@settings(max_examples=350, deadline=None)
def test_any_composition_does_to_the_future_what_it_does_to_the_batch(sizes, operations, state):
    parts = [make_batch(size, seed=i) for i, size in enumerate(sizes)]
    for part in parts:
        part.non_tensor_batch["uid"] = np.array([f"{id(part)}/{i}" for i in range(len(part))], dtype=object)
    future, handles = stored(parts, borrowed=state == "borrowed") if state else unmade(parts)
    batch = DataProto.concat(parts)
    if "split" in [name for name, _ in operations]:
        make(handles, parts)  # a split waits for the number of rows
    for name, number in operations:
        future, batch = apply(future, batch, name, number)
    make(handles, parts)
    for handle in handles:
        handle.moved()
    assert_same(there_and_back(future).get(), batch)
    assert all(handle.moved() <= 1 for handle in handles)
    index = future.index
    assert all(handle.moved() == 0 for handle in handles)
    assert len(future) == len(batch)
    assert_index_of(index, batch)
    assert list(index.uids) == list(batch.non_tensor_batch["uid"])


@both_states
def test_only_results_that_hold_wanted_rows_and_columns_are_fetched(future_of):
    left = [make_batch(3, seed=i) for i in range(4)]
    right = [DataProto({"value": torch.arange(i, i + 6.0)}) for i in (0, 6)]
    (a, left_handles), (b, right_handles) = future_of(left), future_of(right)
    both = a.union(b)
    wanted = both.chunk(4)[1], both.rows([7, 6, 1]).select("score"), both.select("value").chunk(2)[1]
    make(left_handles, left)
    make(right_handles, right)
    whole = DataProto.concat(left).union(DataProto.concat(right))
    expected = whole.chunk(4)[1], whole[[7, 6, 1]].select(["score"], []), whole.select(["value"], [])[6:]
    fetches = ([0, 1, 0, 0], [1, 0]), ([1, 0, 1, 0], [0, 0]), ([0, 0, 0, 0], [0, 1])
    for future, batch, fetched in zip(wanted, expected, fetches, strict=True):
        assert_same(future.get(), batch)
        assert ([h.moved() for h in left_handles], [h.moved() for h in right_handles]) == fetched
    assert len(a.union(b).index) == 12
    assert not any(handle.moved() for handle in left_handles + right_handles)


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
    assert asked(handles) == 0
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


@both_states
@pytest.mark.parametrize("rows", [0, 2, 13])
def test_balanced_shares(future_of, rows):
    batch = make_batch(rows, seed=3)
    parts = batch.chunk(3)
    future, handles = future_of(parts)
    shares = future.chunk(4, balance="tokens")
    assert future_of is stored or asked(handles) == 0
    make(handles, parts)
    expected = partition(batch.ragged("tokens").lengths.tolist(), 4)
    for share, numbers in zip(shares, expected, strict=True):
        assert_same(there_and_back(share).get(), batch[numbers])


def test_balanced_by_a_column_that_is_not_there():
    future, handles = unmade([make_batch(4)])
    share = future.chunk(2, balance="nothere")[0]
    make(handles, [make_batch(4)])
    for wait in (share.get, lambda: future.chunk(2, balance="score")):
        with pytest.raises(DataError, match="ragged column"):
            wait()


@both_states
def test_results_of_a_division_come_back_in_order(future_of):
    batch = make_batch(11, seed=4)
    given_, handles = future_of([batch])
    shares = division([given_], 3, "tokens")
    members = partition(batch.ragged("tokens").lengths.tolist(), 3)
    parts = [batch[rows].select(["score"], []) for rows in members]
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


@both_states
def test_meta_info_of_batches_without_columns_is_kept_and_conflicts_are_refused(future_of):
    def both(*metas: dict[str, float]) -> BatchFuture:
        parts = [DataProto(meta_info=meta) for meta in metas]
        future, handles = future_of(parts)
        make(handles, parts)
        return there_and_back(future)

    agreed = both({"loss": 1.5}, {"loss": 1.5, "lr": 0.1}, {})
    assert agreed.get().meta_info == {"loss": 1.5, "lr": 0.1}
    assert (len(agreed), agreed.index.columns) == (0, ())
    batch = DataProto({"x": torch.zeros(2)})
    joined = BatchFuture.concat([both({"a": 1}).union(batch), both({"b": 2}).union(batch)])
    assert joined.chunk(4)[3].get().meta_info == {"a": 1, "b": 2}
    by_rows = BatchFuture.concat([both({"loss": loss}).union(batch) for loss in (1.5, 2.5)]).rows([3])
    for conflicting in (both({"loss": 1.5}, {"loss": 2.5}), by_rows):
        with pytest.raises(DataError) as refused:
            conflicting.get()
        assert refused.value.field == "loss"
