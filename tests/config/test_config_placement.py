"""Pools, the roles placed on them, worker classes and the cluster."""

from __future__ import annotations

import pytest

from tandem.config.cluster import ROLES
from tandem.config.load import load_train_config
from tandem.config.sizes import derived
from tandem.config.trainer import TrainerConfig

P, Q, W = "trainer.placement", "trainer.resource_pools", "trainer.worker_classes"
POOLS = f"{Q}={{a: [2], b: [1], c: [1]}}"
CRITIC_APART = f"{P}={{actor_rollout: a, critic: b, reward: c}}"
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4")


def places(trainer: TrainerConfig) -> dict[str, str | None]:
    return {role: trainer.placed(role) for role in ROLES}


def test_without_a_word_everything_is_in_one_process(load):
    trainer = load().config.trainer
    assert trainer.pools == {"global_pool": (1,)}
    assert places(trainer) == {**dict.fromkeys(ROLES, "global_pool"), "reward": None}
    assert (trainer.world_size, trainer.devices_of("actor"), trainer.resolved_backend) == (1, 1, "local")


def test_a_number_of_devices_colocates_all_roles(load):
    loaded = load("trainer.n_gpus_per_node=2")
    trainer = loaded.config.trainer
    assert trainer.pools == {"global_pool": (2,)}
    assert places(trainer) == {**dict.fromkeys(ROLES, "global_pool"), "reward": None}
    assert (trainer.world_size, trainer.devices_of("critic"), trainer.devices_of("reward")) == (2, 2, 1)
    assert trainer.resolved_backend == "ray"
    assert loaded.notices == ()
    assert load("trainer.n_gpus_per_node=4", "trainer.nnodes=2").config.trainer.pools == {
        "global_pool": (4, 4)
    }


@pytest.mark.parametrize(
    "words",
    [
        (POOLS, CRITIC_APART),
        (
            f"{Q}.a=[2]",
            f"{Q}.b=1",
            f"{Q}.c=[1]",
            f"{P}.actor_rollout=a",
            f"{P}.critic=b",
            f"{P}.reward=c",
        ),
        (POOLS, f"{P}={{actor: a, rollout: a, critic: b, reward: c}}"),
        (POOLS, f"{P}={{critic: b, reward: c}}"),
        (f"{Q}={{a: [2], b: [1], c: [1], d: [4]}}", f"{Q}.d=null", CRITIC_APART),
        (POOLS, CRITIC_APART, f"{P}.ref=b", f"{P}.ref=null"),
    ],
)
def test_roles_on_pools_of_their_own(load, words):
    loaded = load(*words)
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
    trainer = load(POOLS, f"{P}={{actor: b, rollout: a, critic: c}}").config.trainer
    assert [trainer.placed(role) for role in ("ref", "reward_model", "rollout")] == ["b", "b", "a"]
    assert (trainer.devices_of("ref"), trainer.devices_of("rollout"), trainer.world_size) == (1, 2, 4)


def test_overrides_are_added_to_the_pools_of_the_file(tmp_path, required):
    (tmp_path / "run.yaml").write_text(
        "trainer:\n  resource_pools: {a: [4], b: [2]}\n  placement: {critic: b}\n"
    )
    words = [
        *required,
        f"{Q}.a=[8, 8]",
        f"{Q}.c=[1]",
        f"{P}.ref=c",
        "actor_rollout_ref.actor.use_kl_loss=true",
    ]
    trainer = load_train_config(str(tmp_path / "run.yaml"), words).config.trainer
    assert trainer.pools == {"a": (8, 8), "b": (2,), "c": (1,)}
    assert trainer.placement == {"critic": "b", "ref": "c"}


@pytest.mark.parametrize(
    ("words", "backend"),
    [
        (("trainer.backend=ray",), "ray"),
        (("trainer.backend=local",), "local"),
        ((f"{Q}={{a: [1]}}",), "local"),
        ((f"{Q}={{a: [1], r: [1]}}", f"{P}={{reward: r}}"), "ray"),
    ],
)
def test_backend(load, words, backend):
    assert load(*words).config.trainer.resolved_backend == backend


NOTICES = {
    "roles that this run has not": (
        [POOLS, f"{P}={{actor_rollout: a, critic: b, ref: c, reward_model: c}}", *GRPO],
        [
            f"{P}.critic: no effect; this run has no critic (algorithm.adv_estimator does not need it).",
            f"{P}.ref: no effect; this run has no reference policy (no KL term needs it).",
            f"{P}.reward_model: no effect; this run has no reward model (reward_model.enable=false).",
        ],
    ),
    "class of a role that this run has not": (
        [f"{W}.ref=m:Ref", f"{W}.batch=m:Batch"],
        [f"{W}.ref: no effect; this run has no reference policy (no KL term needs it)."],
    ),
    "reward functions beside a reward model": (
        [
            f"{Q}={{a: 1, b: 1, c: 1}}",
            f"{P}={{reward_model: b, reward: c}}",
            "reward_model.enable=true",
            "reward_model.model.path=${actor_rollout_ref.model.path}",
        ],
        [f"{P}.reward: no effect; this run has no reward functions (reward_model.enable=true)."],
    ),
    "reward model that is off": (
        ["reward_model.forward_micro_batch_size_per_gpu=4"],
        ["reward_model.forward_micro_batch_size_per_gpu: no effect; used only if reward_model.enable=true."],
    ),
    "cluster of one process": (
        ["trainer.timeouts.call=60", "trainer.cluster.interface=eth0"],
        [
            "trainer.cluster.interface, trainer.timeouts.call: no effect; used only if the run has more "
            "than one process, or trainer.backend=ray."
        ],
    ),
    "balance in one process": (
        ["trainer.balance_batch=false", "trainer.backend=ray"],
        ["trainer.balance_batch: no effect; used only if a pool has more than one process."],
    ),
    "store of a cluster that is there": (
        ["trainer.backend=ray", "trainer.cluster.address=10.0.0.1:6379", "trainer.cluster.object_store_gb=2"],
        [
            "trainer.cluster.object_store_gb: no effect; used only if trainer.cluster.address=null, "
            "so that Ray is started for this run."
        ],
    ),
    "restarts without checkpoints": (
        ["trainer.n_gpus_per_node=2", "trainer.max_restarts=2"],
        [
            "trainer.max_restarts: without checkpoints, a restarted run starts over from the beginning; set "
            "trainer.save_freq."
        ],
    ),
}


@pytest.mark.parametrize("name", NOTICES)
def test_notice(load, name):
    overrides, notices = NOTICES[name]
    assert list(load(*overrides).notices) == notices


@pytest.mark.parametrize(
    "overrides",
    [
        (POOLS, CRITIC_APART, "trainer.n_gpus_per_node=3"),
        (f"{Q}={{a: [4, 4]}}", "trainer.n_gpus_per_node=4", "trainer.nnodes=2"),
        ("trainer.n_gpus_per_node=2", "trainer.balance_batch=false", "trainer.timeouts.call=0.5"),
        ("trainer.backend=ray", "trainer.cluster.address=auto", "trainer.cluster.namespace=mine"),
        ("trainer.backend=ray", "trainer.cluster.address='[fd00::1]:6379'"),
        ("trainer.backend=ray", "trainer.cluster.object_store_gb=0.5", "trainer.cluster.temp_dir=/tmp/ray"),
        (f"{W}={{actor: 'pkg.module:Actor', data: 'pkg.module:Data'}}",),
        ("trainer.backend=ray", "trainer.max_restarts=1", "trainer.save_freq=5"),
        (f"{Q}=null", f"{P}=null"),
    ],
)
def test_right_combinations_pass_without_a_word(load, overrides):
    assert load(*overrides).notices == ()


def test_classes_in_files(load, tmp_path):
    (tmp_path / "mine.py").touch()
    reference = f"{tmp_path / 'mine.py'}:Critic"
    assert load(f"{W}.critic={reference}").config.trainer.worker_classes == {"critic": reference}


def test_defaults_of_limits_and_addresses(load):
    trainer = load().config.trainer
    assert trainer.timeouts.model_dump() == {
        "start": 300, "call": 7200, "answer": 30, "collective": 1800, "resources": 60, "stop": 10,
    }  # fmt: skip
    assert trainer.cluster.model_dump() == {
        "address": None, "namespace": None, "interface": None, "master_port": 0,
        "object_store_gb": None, "temp_dir": None, "ray_init": {},
    }  # fmt: skip
    assert (trainer.balance_batch, trainer.max_restarts, trainer.worker_classes) == (True, 0, {})


def test_sizes_of_a_split_run(load):
    sizes = derived(load(POOLS, CRITIC_APART, "trainer.timeouts.call=60").config)
    shown = {name: sizes[name] for name in sizes if name in ("devices", "backend") or name.startswith("pool")}
    assert shown == {
        "devices": 3,
        "backend": "ray",
        "pool a": "2 processes: actor, rollout",
        "pool b": "1 process: critic",
        "pool c": "1 process: reward",
    }
    two_nodes = derived(load("trainer.n_gpus_per_node=4", "trainer.nnodes=2").config)
    assert two_nodes["pool global_pool"] == "4 + 4 processes: actor, rollout, critic"


def test_roles_of_a_run(load):
    def roles(*words):
        return load(*words).config.roles

    assert roles() == ("actor", "rollout", "critic", "reward")
    assert roles(*GRPO, "algorithm.use_kl_in_reward=true") == ("actor", "rollout", "ref", "reward")
    on = ("reward_model.enable=true", "reward_model.model.path=${actor_rollout_ref.model.path}")
    assert roles(*on) == ("actor", "rollout", "critic", "reward_model")
    assert roles("algorithm.adv_estimator=my.module:mine") == ("actor", "rollout", "critic", "reward")
