"""The code samples of the architecture report, with workers that compute simple values without models."""

from importlib import import_module
from typing import Any

import pytest
import torch

from tandem.errors import ConfigError
from tandem.protocol import DataProto, Ragged
from tandem.runtime import (
    BaseWorker,
    BatchFuture,
    Dispatch,
    LocalBackend,
    Placement,
    Role,
    Worker,
    WorkerGroup,
    register,
)  # fmt: skip
from tests.runtime.multi_worker import ThreadBackend

PROMPTS = [[[3, 1], [4], [1, 5, 9, 2], [6, 5], [3]], [[5, 8], [9, 7, 9], [3]], [[2], [3, 8, 4]]]
"""Three batches of 5, 3 and 2 prompts; two workers never get the same number of tokens."""


class ActorRolloutRef(Worker):
    """A policy that responds with the prompt backwards; each update halves its log-probs."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.learnt = 0.0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        rows = [torch.cat([row, row.flip(0)]) for row in prompts.ragged("prompts")]
        return DataProto({"tokens": Ragged.from_list(rows, torch.int64)}, prompts.non_tensor_batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        return DataProto({"old_log_probs": self._log_prob(batch, self.scale)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        return DataProto({"ref_log_probs": self._log_prob(batch, 1.0)})

    def _log_prob(self, batch: DataProto, scale: float) -> Ragged:
        tokens = batch.ragged("tokens")
        return tokens.with_values(-scale * tokens.values.double())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, collect="first")
    def update_actor(self, batch: DataProto, advantages: DataProto) -> dict[str, float]:
        firsts = batch.ragged("tokens").values[batch.ragged("tokens").offsets[:-1]]
        self.learnt += float((firsts * advantages.dense("advantages")).sum())
        self.scale /= 2
        return {"scale": self.scale}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def state(self) -> tuple[float, float]:
        return self.scale, self.learnt


class Critic(Worker):
    """A critic whose value of a sample is the sum of its tokens times a factor; each update adds 1 to it."""

    def __init__(self) -> None:
        self.factor = 1
        self.learnt = 0.0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_values(self, batch: DataProto) -> DataProto:
        sums = [float(row.sum()) for row in batch.ragged("tokens")]
        return DataProto({"values": self.factor * torch.tensor(sums, dtype=torch.float64)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, collect="first")
    def update_critic(self, batch: DataProto, advantages: DataProto) -> None:
        self.learnt += float((batch.ragged("tokens").lengths * advantages.dense("advantages")).sum())
        self.factor += 1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def state(self) -> tuple[int, float]:
        return self.factor, self.learnt


class RewardModel(Worker):
    """A reward model that prefers long samples."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_scores(self, batch: DataProto) -> DataProto:
        return DataProto({"scores": batch.ragged("tokens").lengths.double()})


def compute_advantages(values: BatchFuture, rewards: BatchFuture) -> DataProto:
    return DataProto({"advantages": rewards.get().dense("scores") - values.get().dense("values")})


@pytest.fixture(params=["local", "threads", pytest.param("ray", marks=pytest.mark.slow)])
def groups(request):
    """Yield actor, critic and reward: in this process, on threads, or in processes that two of them share."""
    roles = {Role.ActorRolloutRef: "actor_pool", Role.Critic: "critic_pool", Role.RewardModel: "reward_pool"}
    sizes, backend = (1, 1, 1), LocalBackend()
    if request.param == "threads":
        sizes, backend = (2, 1, 3), ThreadBackend()
    if request.param == "ray":
        pytest.importorskip("ray")
        request.getfixturevalue("ray_cluster")
        sizes, roles[Role.Critic] = (2, 2, 1), "actor_pool"
        backend = import_module("tandem.runtime.ray_backend").RayBackend("report", device="cpu")
    spec = {f"{name}_pool": [size] for name, size in zip(("actor", "critic", "reward"), sizes, strict=True)}
    placement = Placement(spec, roles)
    yield [
        WorkerGroup(backend, worker, placement.pool(role), role=role.name)
        for worker, role in zip((ActorRolloutRef, Critic, RewardModel), roles, strict=True)
    ]
    backend.shutdown()


@pytest.fixture
def dataloader():
    return [
        DataProto({"prompts": Ragged.from_list(rows)}, {"uid": [f"{b}-{i}" for i in range(len(rows))]})
        for b, rows in enumerate(PROMPTS)
    ]


def lists(column: Ragged) -> list[list[Any]]:
    return [row.tolist() for row in column]


def test_simple_ppo_loop(groups, dataloader):
    """The samples of sections 6.1 and 8.1 of the report."""
    actor_rollout_ref_wg, critic_wg, reward_wg = groups
    num_epochs = 2
    seen = []

    # Simple PPO loop with distributed execution
    for epoch in range(num_epochs):  # noqa: B007
        for prompt_batch in dataloader:
            # Rollout phase
            trajectories = actor_rollout_ref_wg.generate_sequences(prompt_batch)

            # Compute required values
            old_log_probs = actor_rollout_ref_wg.compute_log_prob(trajectories)
            ref_log_probs = actor_rollout_ref_wg.compute_ref_log_prob(trajectories)
            values = critic_wg.compute_values(trajectories)
            rewards = reward_wg.compute_scores(trajectories)

            # Advantage computation (on controller)
            advantages = compute_advantages(values, rewards)

            # Update phase
            actor_rollout_ref_wg.update_actor(trajectories, advantages)
            critic_wg.update_critic(trajectories, advantages)

            futures = (trajectories, old_log_probs, ref_log_probs, values)
            assert all(isinstance(future, BatchFuture) for future in futures)
            seen.append((*(future.get() for future in futures), advantages))

    actor_learnt, critic_learnt = 0.0, 0.0
    for step, (output, old, ref, values, advantages) in enumerate(seen):
        batch = step % len(PROMPTS)
        expected = [row + row[::-1] for row in PROMPTS[batch]]
        assert lists(output.ragged("tokens")) == expected
        assert list(output.non_tensor_batch["uid"]) == [f"{batch}-{i}" for i in range(len(expected))]
        assert values.dense("values").tolist() == [float((1 + step) * sum(row)) for row in expected]
        assert lists(old.ragged("old_log_probs")) == [[-t * 0.5**step for t in row] for row in expected]
        assert lists(ref.ragged("ref_log_probs")) == [[-float(t) for t in row] for row in expected]
        by_hand = [len(row) - (1 + step) * sum(row) for row in expected]
        assert advantages.dense("advantages").tolist() == by_hand
        actor_learnt += sum(row[0] * a for row, a in zip(expected, by_hand, strict=True))
        critic_learnt += sum(len(row) * a for row, a in zip(expected, by_hand, strict=True))
    assert len(seen) == num_epochs * len(PROMPTS)
    scales, learnt = zip(*actor_rollout_ref_wg.state(), strict=True)  # each worker made each update
    assert (set(scales), sum(learnt)) == ({0.5 ** len(seen)}, actor_learnt)
    factors, learnt = zip(*critic_wg.state(), strict=True)
    assert (set(factors), sum(learnt)) == ({1 + len(seen)}, critic_learnt)


# fmt: off
class CustomActorWorker(BaseWorker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def custom_operation(self, data: DataProto) -> DataProto:
        # Your custom implementation
        # Automatic handling of:
        # - Data distribution
        # - Remote execution
        # - Result collection
        pass
# fmt: on


class Shares(CustomActorWorker):
    def custom_operation(self, data: DataProto) -> DataProto:
        place = torch.tensor([self.rank, len(data)]).expand(len(data), 2)
        return DataProto({"place": place, "score": data.dense("score") * 2})


def test_custom_worker():
    """The sample of section 10.1 of the report."""
    data = DataProto({"score": torch.tensor([1.0, 2.0, 3.0])})
    pool = Placement({"pool": [2]}, {Role.ActorRollout: "pool"}).pool(Role.ActorRollout)
    empty, full = (WorkerGroup(ThreadBackend(), worker, pool) for worker in (CustomActorWorker, Shares))
    assert empty.custom_operation(data) is None
    out = full.custom_operation(data)
    assert out.dense("score").tolist() == [2.0, 4.0, 6.0]
    assert out.dense("place").tolist() == [[0, 2], [0, 2], [1, 1]]
    empty.shutdown()
    full.shutdown()


# fmt: off
def resource_pools() -> Placement:
    """Return the pools of section 4.1 of the report."""
    n_gpus_per_node, nnodes = 8, 4

    resource_pool_spec = {
        'global_pool': [n_gpus_per_node] * nnodes,
        'actor_pool': [8] * 4,  # 32 GPUs for actor
        'critic_pool': [4] * 4,  # 16 GPUs for critic
    }

    mapping = {
        Role.ActorRollout: 'actor_pool',
        Role.Critic: 'critic_pool',
        Role.RefPolicy: 'actor_pool',  # Colocated with actor
    }

    return Placement(resource_pool_spec, mapping)
# fmt: on


def test_resource_pools_and_role_mapping():
    placement = resource_pools()
    sizes = {name: (pool.nnodes, pool.world_size) for name, pool in placement.pools.items()}
    assert sizes == {"global_pool": (4, 32), "actor_pool": (4, 32), "critic_pool": (4, 16)}
    assert placement.pool(Role.RefPolicy) is placement.pool(Role.ActorRollout)
    assert placement.pool(Role.Critic).process_on_nodes == (4, 4, 4, 4)
    with pytest.raises(ConfigError, match="'reward_pool'"):
        Placement({"reward_pool": [2] * 2}, {Role.RewardModel: "rewards_pool"})
