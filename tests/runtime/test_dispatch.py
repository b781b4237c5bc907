from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import ConfigError, DataError
from tandem.protocol import DataProto
from tandem.runtime import BatchFuture, Mesh, MeshPlace, Placement, ResourcePool, Role, dispatch
from tandem.runtime.dispatch import (
    Registration,
    collect_batches,
    collect_lists,
    dispatch_batches,
    dispatch_lists,
)
from tests.runtime.multi_worker import assert_same, make_batch


@given(rows=st.integers(0, 19), world_size=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_batches_round_trip_in_a_flat_world(rows, world_size):
    batch, mesh = make_batch(rows), Mesh.flat(world_size)
    calls = dispatch_batches(mesh, (batch, BatchFuture.of(batch)), {"scale": 2.0})
    shares = [args[0] for args, _ in calls]
    longer, size = rows % world_size, rows // world_size
    assert [len(share) for share in shares] == [size + (rank < longer) for rank in range(world_size)]
    for (share, future), options in calls:
        assert options == {"scale": 2.0} and set(share.columns) == set(batch.columns)
        assert_same(future.get(), share)
    assert_same(collect_batches(mesh, shares), batch)


@pytest.mark.parametrize(("dp", "tp", "pp"), [(2, 2, 2), (3, 2, 2), (1, 4, 2), (4, 1, 1), (2, 1, 3)])
@pytest.mark.parametrize("rows", [0, 1, 5, 7])
def test_toy_mesh(dp, tp, pp, rows):
    """Ranks are (pp, dp, tp), tp fastest; tensor rank 0 of the last stage collects."""
    places = [
        MeshPlace(dp_rank, dp, collects=tp_rank == 0 and stage == pp - 1)
        for stage, dp_rank, tp_rank in product(range(pp), range(dp), range(tp))
    ]
    mesh, batch, results = Mesh(tuple(places), "toy"), make_batch(rows), []
    for place, (_, kwargs) in zip(mesh.places, dispatch_batches(mesh, (), {"batch": batch}), strict=True):
        assert_same(kwargs["batch"], batch.chunk(dp)[place.dp_rank])
        results.append(kwargs["batch"] if place.collects else "not looked at")
    assert_same(collect_batches(mesh, results), batch)
    assert dispatch.collect_first(mesh, list(range(mesh.world_size))) == dp * tp * (pp - 1)


def test_meta_info_of_results_without_columns_is_that_of_all_ranks():
    mesh = Mesh.flat(2)
    agreed = [DataProto(meta_info={"loss": 1.5}), DataProto(meta_info={"loss": 1.5, "lr": 0.1})]
    assert collect_batches(mesh, agreed).meta_info == {"loss": 1.5, "lr": 0.1}
    assert_same(collect_batches(mesh, [DataProto(), make_batch(2)]), make_batch(2))
    with pytest.raises(DataError, match="different values under one name"):
        collect_batches(mesh, [agreed[0], DataProto(meta_info={"loss": 2.5})])


@given(items=st.lists(st.integers(), max_size=15), world_size=st.integers(1, 8))
def test_lists_round_trip(items, world_size):
    mesh = Mesh.flat(world_size)
    shares = [args[0] for args, _ in dispatch_lists(mesh, (items, "for all"), {})]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert collect_lists(mesh, shares) == items
    turned = Mesh((MeshPlace(1, 2), MeshPlace(0, 2)))  # collection is in order of dp rank, not of rank
    assert dispatch_lists(turned, ([1, 2, 3],), {}) == [(([3],), {}), (([1, 2],), {})]
    assert collect_lists(turned, [[3], [1, 2]]) == [1, 2, 3]


def test_one_to_all_and_rank_zero():
    mesh = Mesh.flat(3)
    assert dispatch.dispatch_one_to_all(mesh, (1,), {"b": 2}) == [((1,), {"b": 2})] * 3
    assert dispatch.dispatch_rank_zero(mesh, (1,), {"b": 2}) == [((1,), {"b": 2}), None, None]
    others = {"text": "ab", "pair": (3, 4)}  # arguments that are no list go to all
    assert dispatch_lists(Mesh.flat(2), ([1, 2],), others) == [(([1],), others), (([2],), others)]
    with pytest.raises(ConfigError, match="parentheses"):
        Registration(dispatch_mode=lambda self: None)


def test_all_to_all_gives_each_rank_its_item():
    mesh = Mesh.flat(2)
    assert dispatch.dispatch_all_to_all(mesh, ([1, 2],), {"b": (3, 4)}) == [
        ((1,), {"b": 3}),
        ((2,), {"b": 4}),
    ]
    for wrong in ([1, 2, 3], 5):
        with pytest.raises(DataError, match="a list of 2"):
            dispatch.dispatch_all_to_all(mesh, (wrong,), {})


def test_batches_of_different_size_and_results_that_are_no_list_are_refused():
    with pytest.raises(DataError, match=r"3 rows.*2 rows"):
        dispatch_batches(Mesh.flat(2), (make_batch(3),), {"other": make_batch(2)})
    with pytest.raises(DataError, match="rank 1"):
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


@pytest.mark.parametrize("counts", [[], [0], [8, -1], [1.5], ["8"], [True], 8, None])
def test_malformed_pools(counts):
    with pytest.raises(ConfigError, match="actor_pool"):
        ResourcePool(counts, "actor_pool")


def test_placement():
    placement = Placement(
        {"actor_pool": [8] * 4, "critic_pool": [4] * 4},
        {Role.ActorRollout: "actor_pool", Role.Critic: "critic_pool", Role.RefPolicy: "actor_pool"},
    )
    assert placement.pool(Role.RefPolicy) is placement.pool(Role.ActorRollout)
    pool = placement.pool(Role.Critic)
    assert (pool.world_size, pool.nnodes, pool.process_on_nodes) == (16, 4, (4, 4, 4, 4))
    assert placement.roles("actor_pool") == (Role.ActorRollout, Role.RefPolicy)
    with pytest.raises(ConfigError, match="RewardModel: no resource pool"):
        placement.pool(Role.RewardModel)


def test_a_misspelt_pool_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'actor_pool'") as error:
        Placement({"actor_pool": [1], "critic_pool": [1]}, {Role.Critic: "actr_pool"})
    assert error.value.field == "pool of role Critic"
