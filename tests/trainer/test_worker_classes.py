"""Tests of the worker class of each role, of its processes, and of the roles that share a group."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.runtime import Placement, Role
from tandem.trainer.casting import REWARD_POOL, RolePlan, load_classes, plan_groups
from tandem.workers.actor import ActorWorker
from tandem.workers.critic import CriticWorker
from tests.support.runs import Lab

EVERYBODY = frozenset({"actor", "rollout", "ref", "critic", "reward"})
OWN = '''
import torch

from tandem.protocol import DataProto
from tandem.runtime import BaseWorker, Dispatch, register
from tandem.workers.actor import ActorWorker
from tandem.workers.critic import CriticWorker
from tandem.workers.reward import at_last_token

class OwnCritic(CriticWorker):
    """A critic with changed values and an additional method."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_values(self, batch):
        out = super().compute_values(batch)
        out.batch["values"] = out.ragged("values").with_values(out.ragged("values").values + 7)
        return out

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self):
        return self.rank, self.world_size


class Constant(BaseWorker):
    """A reward worker with the method names of a reward model."""

    def __init__(self, tokenizer, reward, config, run):
        super().__init__()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_scores(self, batch):
        mask = batch.ragged("response_mask")
        scores = torch.full((len(batch),), 0.25)
        return DataProto(
            {"scores": scores, "token_level_scores": at_last_token(scores, mask)},
            {"reward_extra": [{} for _ in range(len(batch))], "response_text": [""] * len(batch)},
        )


class Plain(BaseWorker):
    """A rollout worker that returns all samples at once and measures nothing."""

    def __init__(self, *args, **kwargs):
        self.inner = ActorWorker(*args, **kwargs)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def generate_sequences(self, prompts, n, params):
        return self.inner.generate_sequences(prompts, n, params)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, bucket):
        self.inner.load_weights(bucket)


class Incomplete(BaseWorker):
    @register()
    def compute_values(self, batch): ...

    def update_critic(self, batch): ...


class SavesNoLater(Constant):
    """A critic with only the methods that every run calls."""

    @register()
    def compute_values(self, batch): ...

    @register()
    def update_critic(self, batch): ...

    @register()
    def save_checkpoint(self, path): ...

    @register()
    def load_checkpoint(self, path): ...


class NoWorker: ...
'''


@pytest.fixture(scope="module")
def own(lab: Lab) -> Path:
    path = lab.folder / "own.py"
    path.write_text(OWN)
    return path


HELPERS = {"data": (["data"], "controller_pool"), "batch": (["batch"], "controller_pool")}


def groups(placement: Placement, played: frozenset[str]) -> dict[str, tuple[list[str], str]]:
    """Return the roles and the pool of each group."""
    found = plan_groups(placement, RolePlan(played))
    return {role: (sorted(tenant.parts), tenant.pool.name) for role, tenant in found.items()}


def test_what_is_on_one_pool_shares_weights_and_what_is_apart_does_not() -> None:
    pools = {"a": [1], "b": [2]}
    together = {Role.Actor: "a", Role.Rollout: "a"}
    assert groups(Placement(pools, together), EVERYBODY) == {
        **HELPERS, "actor": (["actor", "ref", "rollout"], "a"), "critic": (["critic"], "a"),
        "reward": (["reward"], REWARD_POOL.name),
    }  # fmt: skip
    assert not REWARD_POOL.on_device

    apart = {Role.ActorRollout: "a", Role.RefPolicy: "b", Role.Critic: "b", Role.Reward: "b"}
    assert groups(Placement(pools, apart), EVERYBODY) == {
        **HELPERS, "actor": (["actor", "rollout"], "a"), "critic": (["critic"], "b"), "ref": (["ref"], "b"),
        "reward": (["reward"], "b"),
    }  # fmt: skip

    far = {Role.Actor: "a", Role.Rollout: "b"}
    assert groups(Placement(pools, far), EVERYBODY - {"reward"}) == {
        **HELPERS, "actor": (["actor", "ref"], "a"), "critic": (["critic"], "a"),
        "rollout": (["rollout"], "b"),
    }  # fmt: skip


def test_a_placement_without_an_actor_is_refused() -> None:
    with pytest.raises(ConfigError, match="no resource pool is mapped to the actor"):
        plan_groups(Placement({"a": [1]}, {Role.Critic: "a"}), RolePlan(EVERYBODY))


def test_a_role_with_a_class_of_its_own_is_a_group_of_its_own() -> None:
    class Mine(ActorWorker):
        pass

    placement = Placement({"a": [1]}, {Role.ActorRolloutRef: "a"})
    for role, parts in (("ref", ["actor", "rollout"]), ("rollout", ["actor", "ref"])):
        found = plan_groups(placement, RolePlan(EVERYBODY, {role: Mine}))
        assert found[role].worker is Mine
        assert sorted(found["actor"].parts) == parts
        assert found["actor"].worker is ActorWorker
    fused = plan_groups(placement, RolePlan(EVERYBODY, {"actor_rollout": Mine}))
    assert fused["actor"].worker is Mine
    assert sorted(fused["actor"].parts) == ["actor", "ref", "rollout"]
    assert fused["critic"].worker is CriticWorker


def test_a_class_for_several_references_needs_the_methods_of_one() -> None:
    several = RolePlan(frozenset({"actor", "rollout", "ref.old", "ref.new"}), {"ref": CriticWorker})
    with pytest.raises(ConfigError, match="the worker class lacks methods") as caught:
        plan_groups(Placement({"a": [1]}, {Role.ActorRolloutRef: "a"}), several)
    assert caught.value.field == "trainer.worker_classes.ref"
    assert caught.value.got == "CriticWorker without compute_ref_log_prob"


def test_a_users_own_workers_take_part_in_the_loop(lab: Lab, own: Path) -> None:
    words = "GAE A.use_kl_loss=true"
    ours = lab.run("ours", words)
    classes = f"W.critic={own}:OwnCritic W.reward={own}:Constant W.rollout={own}:Plain"
    run = lab.run("theirs", words, classes)
    critic = run.trainer.roles.critic
    assert critic is not None
    assert critic.where() == [(0, 1)]
    gap = run.rows[0]["critic/values/mean"] - ours.rows[0]["critic/values/mean"]
    assert gap == pytest.approx(7, abs=1e-5)
    assert run.rows[0]["reward/mean"] == 0.25
    assert run.samples(1)["tokens"] == ours.samples(1)["tokens"]


@pytest.mark.parametrize(
    ("role", "name", "telling"),
    [
        ("critic", "Incomplete", ("trainer.worker_classes.critic: the worker class lacks methods",
                                  "Incomplete without update_critic, save_checkpoint, load_checkpoint",
                                  "@register: compute_values, update_critic")),
        ("rollout", "Constant", ("Constant without generate_sequences, load_weights",)),
        ("data", "Incomplete", ("trainer.worker_classes.data", "describe, train_batch, val_batch")),
        ("critic", "SavesNoLater", ("trainer.async_save: this key needs methods",
                                    "SavesNoLater without begin_save, check_save")),
        ("critic", "NoWorker", ("trainer.worker_classes.critic: this is not a worker class", "OwnCritic")),
        ("critic", "OwnCritik", ("this worker class does not exist", "did you mean 'OwnCritic'?")),
    ],
)  # fmt: skip
def test_a_class_that_cannot_play_its_role_is_refused_before_anything_starts(lab, own, role, name, telling):
    with pytest.raises(ConfigError) as caught:
        lab.run("refused", f"GAE trainer.async_save=true W.{role}={own}:{name}")
    for text in telling:
        assert text in str(caught.value)
    assert not (lab.folder / "refused").exists()


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.py:Worker: the module could not be imported"):
        load_classes({"critic": "nowhere.py:Worker"})
