"""Pools, and the roles placed on them."""

import pytest

from tandem.config.cluster import ROLES
from tandem.config.load import load_train_config
from tandem.config.sizes import derived
from tandem.config.trainer import TrainerConfig
from tests.support.words import rows, words

TOGETHER = {**dict.fromkeys(ROLES, "global_pool"), "reward": None}


def places(trainer: TrainerConfig) -> dict[str, str | None]:
    return {role: trainer.placed(role) for role in ROLES}


def test_all_roles_share_the_pool_unless_placed(load):
    for devices in (1, 2):
        trainer = load(f"trainer.n_gpus_per_node={devices}").config.trainer
        assert (trainer.pools, places(trainer)) == ({"global_pool": (devices,)}, TOGETHER)
        assert [trainer.devices_of(role) for role in ("actor", "critic", "reward")] == [devices, devices, 1]
        assert (trainer.world_size, trainer.resolved_backend) == (devices, ("local", "ray")[devices - 1])


APART = """
POOLS APART
Q.a=[2] Q.b=1 Q.c=[1] P.actor_rollout=a P.critic=b P.reward=c
POOLS P={actor: a, rollout: a, critic: b, reward: c}
POOLS P={critic: b, reward: c}
Q={a: [2], b: [1], c: [1], d: [4]} Q.d=null APART
POOLS APART P.ref=b P.ref=null
"""


@pytest.mark.parametrize("given", rows(APART))
def test_roles_on_pools_of_their_own(load, given):
    loaded = load(given)
    trainer = loaded.config.trainer
    assert trainer.pools == {"a": (2,), "b": (1,), "c": (1,)}
    assert places(trainer) == {
        "actor": "a", "rollout": "a", "ref": "a", "critic": "b", "reward_model": "a", "reward": "c",
    }  # fmt: skip
    assert trainer.placed("actor_rollout") == "a"
    assert [trainer.devices_of(role) for role in ("actor", "critic", "reward")] == [2, 1, 1]
    assert trainer.world_size == 3, "reward functions have no device"
    assert [note for note in loaded.notices if "more than once" not in note] == []


def test_what_is_unplaced_is_with_the_actor_wherever_that_is(load):
    trainer = load("POOLS P={actor: b, rollout: a, critic: c}").config.trainer
    assert [trainer.placed(role) for role in ("ref", "reward_model", "rollout")] == ["b", "b", "a"]
    assert (trainer.devices_of("ref"), trainer.devices_of("rollout"), trainer.world_size) == (1, 2, 4)


def test_overrides_are_added_to_the_pools_of_the_file(tmp_path, required):
    (tmp_path / "run.yaml").write_text(
        "trainer:\n  resource_pools: {a: [4], b: [2]}\n  placement: {critic: b}\n"
    )
    given = [*required, *words("Q.a=[8, 8] Q.c=[1] P.ref=c A.use_kl_loss=true")]
    trainer = load_train_config(str(tmp_path / "run.yaml"), given).config.trainer
    assert trainer.pools == {"a": (8, 8), "b": (2,), "c": (1,)}
    assert trainer.placement == {"critic": "b", "ref": "c"}


def test_sizes_of_a_split_run(load):
    sizes = derived(load("POOLS APART trainer.timeouts.call=60").config)
    shown = {name: sizes[name] for name in sizes if name in ("devices", "backend") or name.startswith("pool")}
    assert shown == {
        "devices": 3, "backend": "ray", "pool a": "2 processes: actor, rollout",
        "pool b": "1 process: critic", "pool c": "1 process: reward",
    }  # fmt: skip
    two_nodes = derived(load("trainer.n_gpus_per_node=4 trainer.nnodes=2").config)
    assert two_nodes["pool global_pool"] == "4 + 4 processes: actor, rollout, critic"
