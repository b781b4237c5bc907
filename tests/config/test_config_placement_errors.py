"""Errors about pools, placement, worker classes and the cluster name their key and the remedy."""

from __future__ import annotations

import pytest

P, Q, W = "trainer.placement", "trainer.resource_pools", "trainer.worker_classes"
POOLS = f"{Q}={{a: [2], b: [1], c: [1]}}"
CRITIC_APART = f"{P}={{actor_rollout: a, critic: b, reward: c}}"

# name: (overrides, field, part of the message, got, part of expected, part of the remedy)
WRONG = {
    "role": (
        [POOLS, CRITIC_APART, f"{P}.refrence=b"],
        f"{P}.refrence",
        "unknown role",
        "refrence",
        "one of actor_rollout, actor, rollout, ref, critic, reward_model, reward",
        "did you mean ref?",
    ),
    "pool": (
        ["trainer.resource_pools={train: [2], score: [1]}", f"{P}={{critic: scores}}"],
        f"{P}.critic",
        "unknown resource pool",
        "scores",
        "one of train, score",
        "did you mean score?",
    ),
    "pool where none is named": (
        [f"{P}.critic=b"],
        f"{P}.critic",
        "unknown resource pool",
        "b",
        "one of global_pool",
        "add it: trainer.resource_pools.b=[…]",
    ),
    "actor twice": (
        [POOLS, CRITIC_APART, f"{P}.actor=b"],
        f"{P}.actor",
        "cannot be combined with actor",
        None,
        None,
        f"remove {P}.actor",
    ),
    "actor without rollout": (
        [POOLS, f"{P}={{actor: a, critic: b, reward: c}}"],
        f"{P}.actor",
        "without rollout",
        "a",
        None,
        f"set {P}.rollout too; or set {P}.actor_rollout",
    ),
    "rollout without actor": (
        [POOLS, f"{P}={{rollout: a, critic: b, reward: c}}"],
        f"{P}.rollout",
        "without actor",
        "a",
        None,
        f"set {P}.actor too; or set {P}.actor_rollout",
    ),
    "pool without a role": (
        [POOLS, f"{P}={{critic: b}}"],
        f"{Q}.c",
        "no role",
        [1],
        None,
        f"{P}.<role>=c",
    ),
    "name of a helper": (
        [f"{Q}={{a: [1], reward_pool: [2]}}", f"{P}.reward=reward_pool"],
        f"{Q}.reward_pool",
        "a pool that every run already has",
        None,
        None,
        "another name",
    ),
    "no processes": (
        [f"{Q}={{a: [2, 0]}}"],
        Q,
        "out of range",
        '{"a": [2, 0]}',
        "mapping, each value: integer >= 1, or a list of them",
        None,
    ),
    "no nodes": (
        [f"{Q}={{a: []}}"],
        Q,
        "the list is empty",
        '{"a": []}',
        "mapping, each value: integer >= 1, or a list of them",
        None,
    ),
    "a number for the pools": (
        [f"{Q}=[4]"],
        Q,
        "wrong type",
        "[4]",
        "mapping, each value: integer >= 1, or a list of them",
        None,
    ),
    "counts that disagree": (
        [POOLS, CRITIC_APART, "trainer.n_gpus_per_node=2", "trainer.nnodes=2"],
        "trainer.n_gpus_per_node",
        "contradicts trainer.resource_pools",
        "2 per node × 2 nodes = 4",
        "3, the devices of all pools together",
        "remove trainer.n_gpus_per_node and trainer.nnodes",
    ),
    "pool without a role beside right counts": (
        [POOLS, f"{P}={{critic: b}}", "trainer.n_gpus_per_node=4"],
        f"{Q}.c",
        "no role",
        [1],
        None,
        f"{P}.<role>=c",
    ),
    "local with two processes": (
        ["trainer.backend=local", "trainer.n_gpus_per_node=2"],
        "trainer.backend",
        "one process",
        "local, with 2 processes",
        "one process in one pool",
        "set trainer.backend=auto",
    ),
    "class role": (
        [f"{W}.critc=mine.module:Critic"],
        f"{W}.critc",
        "unknown role",
        "critc",
        "one of actor_rollout, actor, rollout, ref, critic, reward_model, reward, batch, data",
        "did you mean critic?",
    ),
    "class without a name": (
        [f"{W}.critic=mine.py"],
        f"{W}.critic",
        "not a reference to a class",
        "mine.py",
        "file.py:Class or package.module:Class",
        None,
    ),
    "class in no file": (
        [f"{W}.critic=/nowhere/mine.py:Critic"],
        f"{W}.critic",
        "does not exist",
        "/nowhere/mine.py",
        None,
        "check the path before the colon",
    ),
    "class twice": (
        [f"{W}={{actor_rollout: 'm:A', rollout: 'm:B'}}"],
        f"{W}.rollout",
        "cannot be combined with rollout",
        None,
        None,
        f"remove {W}.rollout",
    ),
    "one class for two places": (
        [f"{Q}={{a: 1, b: 1}}", f"{P}={{actor: a, rollout: b}}", f"{W}.actor_rollout=m:A"],
        f"{W}.actor_rollout",
        "in different pools",
        "m:A",
        None,
        f"set {W}.actor or {W}.rollout, or place both on one pool",
    ),
    "address without a port": (
        ["trainer.backend=ray", "trainer.cluster.address=node7"],
        "trainer.cluster.address",
        "not a valid address",
        "node7",
        "HOST:PORT of the head node, or auto on one of the cluster's machines",
        "`ray start --head`",
    ),
    "address of a Ray client": (
        ["trainer.backend=ray", "trainer.cluster.address=ray://node7:10001"],
        "trainer.cluster.address",
        "not a valid address",
        "ray://node7:10001",
        "HOST:PORT of the head node, or auto on one of the cluster's machines",
        "`ray start --head`",
    ),
    "port": (
        ["trainer.backend=ray", "trainer.cluster.master_port=70000"],
        "trainer.cluster.master_port",
        "out of range",
        "70000",
        "integer >= 0 and <= 65535",
        None,
    ),
    "timeout": (
        ["trainer.backend=ray", "trainer.timeouts.answer=0"],
        "trainer.timeouts.answer",
        "out of range",
        "0",
        "number > 0",
        None,
    ),
    "misspelt pools": (
        ["trainer.resource_pool.a=[2]"],
        "trainer.resource_pool.a",
        "unknown key",
        None,
        None,
        "did you mean trainer.resource_pools?",
    ),
    "misspelt placement": (
        ["trainer.placment={critic: b}"],
        "trainer.placment.critic",
        "unknown key",
        None,
        None,
        "did you mean trainer.placement?",
    ),
    "misspelt timeout": (
        ["trainer.timeouts.strat=9"],
        "trainer.timeouts.strat",
        "unknown key",
        None,
        None,
        "did you mean trainer.timeouts.start?",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(errors, name):
    overrides, field, message, got, expected, remedy = WRONG[name]
    found = errors(*overrides)
    assert list(found) == [field]
    error = found[field]
    assert error.got == got
    for text, given in ((message, error.message), (expected, error.expected), (remedy, error.remedy)):
        assert (text is None) == (given is None)
        assert text is None or text in given
