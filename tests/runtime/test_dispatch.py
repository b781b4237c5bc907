import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import ConfigError, DataError
from tandem.protocol import DataProto
from tandem.runtime import BatchFuture, Dispatch, Mesh, MeshPlace
from tandem.runtime.dispatch import (
    Registration,
    collect_batches,
    collect_first,
    collect_lists,
    dispatch_all_to_all,
    dispatch_batches,
    dispatch_lists,
    dispatch_one_to_all,
    dispatch_rank_zero,
)
from tests.runtime.multi_worker import assert_same, make_batch


def toy_mesh(dp: int, tp: int, pp: int) -> Mesh:
    """Return a mesh with rank = (pp, dp, tp), tp fastest.

    Tensor rank 0 of the last stage collects.
    """
    return Mesh(
        tuple(
            MeshPlace(dp_rank, dp, collects=tp_rank == 0 and stage == pp - 1)
            for stage in range(pp)
            for dp_rank in range(dp)
            for tp_rank in range(tp)
        ),
        "toy",
    )


@given(rows=st.integers(0, 19), world_size=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_batches_round_trip_in_a_flat_world(rows, world_size):
    batch = make_batch(rows)
    mesh = Mesh.flat(world_size)
    calls = dispatch_batches(mesh, (batch,), {"scale": 2.0})
    shares = [args[0] for args, _ in calls]
    sizes = [len(share) for share in shares]
    assert len(shares) == world_size
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert all(kwargs == {"scale": 2.0} for _, kwargs in calls)
    assert all(set(share.columns) == set(batch.columns) for share in shares)
    assert_same(collect_batches(mesh, shares), batch)


def test_seven_samples_on_four_workers():
    calls = dispatch_batches(Mesh.flat(4), (DataProto({"x": torch.arange(7)}),), {})
    assert [args[0].dense("x").tolist() for args, _ in calls] == [[0, 1], [2, 3], [4, 5], [6]]


@pytest.mark.parametrize(("dp", "tp", "pp"), [(2, 2, 2), (3, 2, 2), (1, 4, 2), (4, 1, 1), (2, 1, 3)])
@pytest.mark.parametrize("rows", [0, 1, 5, 7])
def test_toy_mesh(dp, tp, pp, rows):
    mesh = toy_mesh(dp, tp, pp)
    batch = make_batch(rows)
    calls = dispatch_batches(mesh, (), {"batch": batch})
    for place, (_, kwargs) in zip(mesh.places, calls, strict=True):
        assert_same(kwargs["batch"], batch.chunk(dp)[place.dp_rank])
    results = [
        kwargs["batch"] if place.collects else "not looked at"
        for place, (_, kwargs) in zip(mesh.places, calls, strict=True)
    ]
    assert_same(collect_batches(mesh, results), batch)
    first = next(rank for rank, p in enumerate(mesh.places) if p.collects and p.dp_rank == 0)
    assert collect_first(mesh, list(range(mesh.world_size))) == first == dp * tp * (pp - 1)


def test_meta_info_of_results_without_columns_is_that_of_all_ranks():
    mesh = Mesh.flat(2)
    agreed = [DataProto(meta_info={"loss": 1.5}), DataProto(meta_info={"loss": 1.5, "lr": 0.1})]
    assert collect_batches(mesh, agreed).meta_info == {"loss": 1.5, "lr": 0.1}
    assert_same(collect_batches(mesh, [DataProto(), make_batch(2)]), make_batch(2))
    with pytest.raises(DataError, match="different values under one name"):
        collect_batches(mesh, [agreed[0], DataProto(meta_info={"loss": 2.5})])


def test_collection_is_in_order_of_dp_rank_not_of_rank():
    mesh = Mesh((MeshPlace(1, 2), MeshPlace(0, 2)))
    calls = dispatch_lists(mesh, ([1, 2, 3],), {})
    assert calls == [(([3],), {}), (([1, 2],), {})]
    assert collect_lists(mesh, [args[0] for args, _ in calls]) == [1, 2, 3]


def test_futures_and_batches_of_one_call_are_cut_alike():
    batch = make_batch(7)
    calls = dispatch_batches(Mesh.flat(3), (BatchFuture.of(batch), batch), {})
    for future, share in (args for args, _ in calls):
        assert_same(future.get(), share)


@given(items=st.lists(st.integers(), max_size=15), world_size=st.integers(1, 8))
def test_lists_round_trip(items, world_size):
    mesh = Mesh.flat(world_size)
    shares = [args[0] for args, _ in dispatch_lists(mesh, (items, "for all"), {})]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert collect_lists(mesh, shares) == items


def test_arguments_that_are_no_list_go_to_all():
    calls = dispatch_lists(Mesh.flat(2), ([1, 2],), {"text": "ab", "pair": (3, 4)})
    assert calls == [(([1],), {"text": "ab", "pair": (3, 4)}), (([2],), {"text": "ab", "pair": (3, 4)})]


def test_one_to_all_and_rank_zero():
    mesh = Mesh.flat(3)
    assert dispatch_one_to_all(mesh, (1,), {"b": 2}) == [((1,), {"b": 2})] * 3
    assert dispatch_rank_zero(mesh, (1,), {"b": 2}) == [((1,), {"b": 2}), None, None]


def test_all_to_all_gives_each_rank_its_item():
    mesh = Mesh.flat(2)
    assert dispatch_all_to_all(mesh, ([1, 2],), {"b": (3, 4)}) == [((1,), {"b": 3}), ((2,), {"b": 4})]
    for wrong in ([1, 2, 3], 5):
        with pytest.raises(DataError, match="a list of 2"):
            dispatch_all_to_all(mesh, (wrong,), {})


def test_batches_of_different_size_are_refused():
    with pytest.raises(DataError, match=r"3 rows.*2 rows"):
        dispatch_batches(Mesh.flat(2), (make_batch(3),), {"other": make_batch(2)})


def test_collected_lists_must_be_lists():
    with pytest.raises(DataError, match="rank 1 did not return a list"):
        collect_lists(Mesh.flat(2), [[1], None])


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([MeshPlace(0, 1), MeshPlace(0, 2)], "different data-parallel sizes"),
        ([MeshPlace(0, 2), MeshPlace(0, 2, False)], "missing"),
        ([MeshPlace(0, 2), MeshPlace(2, 2)], "out of range"),
        ([MeshPlace(0, 1), MeshPlace(0, 1)], "exactly one"),
        ([MeshPlace(0, 1, False)], "exactly one"),
    ],
)
def test_places_that_make_no_mesh(places, message):
    with pytest.raises(ConfigError, match=message) as error:
        Mesh(tuple(places), "actor")
    assert "mesh 'actor'" in str(error.value)


def test_megatron_names_are_aliases():
    assert Dispatch.MEGATRON_COMPUTE is Dispatch.MEGATRON_COMPUTE_PROTO is Dispatch.ND_COMPUTE_PROTO


def test_every_mode_has_its_functions():
    for mode in Dispatch:
        dispatch, collect = Registration(mode).functions()
        assert callable(dispatch)
        assert callable(collect)


def test_something_else_in_place_of_a_mode():
    with pytest.raises(ConfigError, match="parentheses"):
        Registration(dispatch_mode=lambda self: None)
