from functools import partial

import numpy as np
import pytest
import torch

from tandem.balance import partition
from tandem.errors import DataError
from tandem.runtime import BatchFuture
from tests.runtime.multi_worker import assert_same, make_batch
from tests.support.toys import Balancer, Custom, Parallel, Streamer, Toy


def uneven(rows):
    batch = make_batch(rows, seed=rows, uids=False)
    batch.non_tensor_batch["uid"] = np.array([f"0/{row}" for row in range(rows)], dtype=object)
    return batch


def test_every_mode_on_four_workers(start):
    group = start(partial(Toy, 2.0), 4)
    batch = uneven(7)
    assert group.world_size == 4
    assert group.ranks() == [(rank, 4) for rank in range(4)]
    assert torch.equal(group.double(batch).get().dense("doubled"), batch.dense("score") * 2)
    history = group.history()
    for _ in range(2):  # the result can be read repeatedly
        assert history.get(timeout_s=30.0) == [[2], [2], [2], [1]]
    assert start(partial(Toy, 5.0), 3).only_zero_of(history) == [[2], [2], [2], [1]]
    shifted = group.scores(batch, offset=1.0)
    assert torch.equal(shifted.dense("score"), batch.dense("score") + 1)
    assert list(shifted.non_tensor_batch["uid"]) == list(batch.non_tensor_batch["uid"])
    assert (group.rows_of_rank_zero(batch), group.nothing(batch), group.only_zero(1.5)) == (2, None, 1.5)
    assert group.own_item(["a", "b", "c", "d"]) == ["a0", "b1", "c2", "d3"]
    assert (group.negate([1, 2, 3]), group.count(batch)) == ([-1, -2, -3], 7)
    usage = group.take_usage()
    assert [rank.busy_s > 0 for rank in usage] == [True] * 4
    assert max(rank.busy_s for rank in group.take_usage()) < max(rank.busy_s for rank in usage)
    custom = start(Custom, 3)
    assert custom.place().get() == [(2, 1), None, (0, 3)]
    assert custom.count(uneven(7)) == 7


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_fewer_rows_than_workers(start, rows):
    group = start(partial(Toy, 2.0), 4)
    batch = uneven(rows)
    assert torch.equal(group.double(batch).get().dense("doubled"), batch.dense("score") * 2)
    assert len(group.double(batch).index) == rows
    assert torch.equal(group.scores(BatchFuture.of(batch)).dense("score"), batch.dense("score"))


def test_groups_hand_futures_to_each_other(start):
    first, second = start(partial(Toy, 2.0), 4), start(partial(Toy, 5.0), 3)
    batch = uneven(11)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    scores = first.double(batch).union(batch).rows(order)
    doubled = second.double(scores.select("score"))
    assert torch.equal(doubled.rows(order.argsort()).get().dense("doubled"), batch.dense("score") * 5)
    expected = batch[order].dense("score") * 5
    minis = scores.split(4)
    assert [len(part) for part in minis] == [4, 4, 3]
    for i, mini in enumerate(minis):
        assert torch.equal(second.double(mini).get().dense("doubled"), expected[4 * i : 4 * i + 4])
    both = BatchFuture.concat([second.double(mini) for mini in reversed(minis)]).get()
    assert torch.equal(both.dense("doubled"), torch.cat([expected[8:], expected[4:8], expected[:4]]))


def test_results_belong_to_the_caller(start):
    group = start(partial(Toy, 2.0), 4)
    batch = uneven(6)
    future = group.double(batch)
    for got in (future.get(), future.chunk(4)[0].get(), future.rows([5, 0]).get()):
        expected = got.clone()
        got.dense("doubled").add_(1.0)
        assert not torch.equal(got.dense("doubled"), expected.dense("doubled"))
    assert torch.equal(group.double(future.union(batch)).get().dense("doubled"), batch.dense("score") * 2)


@pytest.mark.parametrize(("dp", "tp", "pp"), [(2, 2, 2), (4, 1, 2), (1, 2, 4)])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_methods_over_named_meshes(start, dp, tp, pp, rows):
    group = start(Parallel, dp * tp * pp)
    group.init_model(dp, tp, pp)
    batch = uneven(rows)
    expected = batch.select(["score"], ["uid"])
    assert_same(group.forward(batch), expected)
    assert_same(group.forward(BatchFuture.of(batch)), expected)
    assert_same(group.forward_later(batch).get(), expected)
    group.init_rollout(2)
    shares = batch.chunk(group.world_size // 2)
    ranks = [2 * i for i, share in enumerate(shares) for _ in range(len(share))]
    assert group.generate(batch).get().dense("rank").tolist() == ranks


@pytest.mark.parametrize("rows", [0, 2, 13])
@pytest.mark.parametrize("known", ["batch", "future", "unmade"])
def test_rows_balanced_by_tokens_come_back_in_order(start, rows, known):
    group = start(Balancer, 3, balance=True)
    batch = uneven(rows)
    echo = start(partial(Toy, 1.0), 4).echo
    given = {"batch": lambda b: b, "future": BatchFuture.of, "unmade": echo}[known](batch)
    lengths = batch.ragged("tokens").lengths.tolist()
    out = group.score(given, scale=2.0)
    again = group.score(out.union(batch)).union(out.select("load")).get()
    out = out.get()
    assert list(again.dense("load")) == list(out.dense("load"))
    firsts = [float(row[0]) if len(row) else -1.0 for row in batch.ragged("tokens")]
    assert out.dense("first").tolist() == [2 * first for first in firsts]
    assert again.dense("first").tolist() == firsts
    assert list(out.non_tensor_batch.get("uid", [])) == list(batch.non_tensor_batch["uid"])
    for rank, members in enumerate(partition(lengths, 3)):
        assert [i for i, r in enumerate(out.dense("rank").tolist()) if r == rank] == members
        assert {out.dense("load")[i].item() for i in members} <= {sum(lengths[i] for i in members)}


def test_balance_of_several_batches_over_a_mesh_and_with_one_result(start):
    group = start(Balancer, 4, balance=True)
    batch = uneven(9)
    lengths = batch.ragged("tokens").lengths.tolist()
    scores = batch.select(["score"], [])
    for other in (scores, BatchFuture.of(scores), start(partial(Toy, 1.0), 3).echo(scores)):
        assert torch.equal(group.add(batch, other).dense("sum"), batch.dense("score") * 2)
        assert torch.equal(group.add(other, batch).dense("sum"), batch.dense("score") * 2)
    assert group.tokens_of_first(batch).get() == sum(lengths[i] for i in partition(lengths, 4)[0])
    group.init_mesh(2)
    assert_same(group.meshed(batch), batch.select(["score"], ["uid"]))
    plain = start(Balancer, 4)
    assert plain.score(batch).get().dense("rank").tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(("rows", "n"), [(7, 1), (7, 3), (2, 2), (0, 2)])
def test_a_stream_is_put_in_the_order_of_ranks_and_rows(start, rows, n):
    group, scorer = start(Streamer, 4), start(Streamer, 3)
    batch = uneven(rows)
    whole = batch.repeat(n)
    stream = group.stream(batch, n)
    out = stream.map(lambda part: part.union(scorer.halve(part)).select("score", "half", "uid", "rank"))
    if rows:
        ranks = [rank for rank, share in enumerate(batch.chunk(4)) for _ in range(len(share) * n)]
        assert out.index.row_ids.tolist() == list(range(rows * n))
        got = out.get()
        assert torch.equal(got.dense("half"), whole.dense("score") / 2)
        assert got.dense("rank").tolist() == ranks
        assert list(got.non_tensor_batch["uid"]) == list(whole.non_tensor_batch["uid"])
        assert torch.equal(scorer.halve(out).get().dense("half"), whole.dense("score") / 2)
        assert_same(stream.all().select("score", "uid").get(), whole.select(["score"], ["uid"]))
    assert len(out) == rows * n
    assert len(list(stream)) == sum(-(-len(share) * n // 2) for share in batch.chunk(4))
    assert sum(map(len, stream)) == rows * n


def test_a_stream_over_a_mesh_takes_the_parts_of_those_that_collect(start):
    group = start(Streamer, 4)
    group.init_mesh(2)
    batch = uneven(5)
    out = group.stream_over_mesh(BatchFuture.of(batch)).all().get()
    assert torch.equal(out.dense("score"), batch.dense("score"))
    assert out.dense("rank").tolist() == [0, 0, 0, 2, 2]


def test_parts_that_make_no_whole(start):
    with pytest.raises(DataError, match=r"Streamer\.stream_wrongly"):
        start(Streamer, 3).stream_wrongly(uneven(9)).all()
    with pytest.raises(DataError, match="one row for each row"):
        start(Balancer, 3, balance=True).drop(uneven(7))
