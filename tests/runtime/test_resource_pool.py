import pytest

from tandem.errors import ConfigError
from tandem.runtime import Placement, ResourcePool, Role


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
