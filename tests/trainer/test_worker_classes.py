import re

import pytest

from tandem.errors import ConfigError
from tandem.runtime import Placement, Role
from tandem.trainer.casting import REWARD_POOL, RolePlan, load_classes, plan_groups
from tandem.workers.actor import ActorWorker
from tandem.workers.critic import CriticWorker
from tests.support.words import rows

EVERYBODY = frozenset({"actor", "rollout", "ref", "critic", "reward"})
OWN = """
import torch

from tandem.protocol import DataProto
from tandem.runtime import BaseWorker, Dispatch, register
from tandem.workers.actor import ActorWorker
from tandem.workers.critic import CriticWorker
from tandem.workers.reward import at_last_token

class OwnCritic(CriticWorker):
    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_values(self, batch):
        out = super().compute_values(batch)
        out.batch["values"] = out.ragged("values").with_values(out.ragged("values").values + 7)
        return out

    @register(Dispatch.ONE_TO_ALL)
    def where(self):
        return self.rank, self.world_size


class Constant(BaseWorker):
    def __init__(self, tokenizer, reward, config, run):
        super().__init__()

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_scores(self, batch):
        mask = batch.ragged("response_mask")
        scores = torch.full((len(batch),), 0.25)
        return DataProto(
            {"scores": scores, "token_level_scores": at_last_token(scores, mask)},
            {"reward_extra": [{} for _ in range(len(batch))], "response_text": [""] * len(batch)},
        )


class Plain(BaseWorker):
    def __init__(self, *args, **kwargs):
        self.inner = ActorWorker(*args, **kwargs)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def generate_sequences(self, prompts, n, params):
        return self.inner.generate_sequences(prompts, n, params)

    @register(Dispatch.ONE_TO_ALL)
    def load_weights(self, bucket):
        self.inner.load_weights(bucket)


class Incomplete(BaseWorker):
    @register()
    def compute_values(self, batch): ...

    def update_critic(self, batch): ...


class NoWorker: ...
"""


@pytest.fixture(scope="module")
def own(lab):
    path = lab.folder / "own.py"
    path.write_text(OWN)
    return path


HELPERS = {"data": (["data"], "controller_pool"), "batch": (["batch"], "controller_pool")}


def groups(placement, played):
    found = plan_groups(placement, RolePlan(played))
    return {role: (sorted(tenant.parts), tenant.pool.name) for role, tenant in found.items()}


def test_what_is_on_one_pool_shares_weights_and_what_is_apart_does_not():
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


def test_a_placement_without_an_actor_is_refused():
    with pytest.raises(ConfigError, match="no resource pool is mapped to the actor"):
        plan_groups(Placement({"a": [1]}, {Role.Critic: "a"}), RolePlan(EVERYBODY))


def test_a_role_with_a_class_of_its_own_is_a_group_of_its_own():
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


def test_a_class_for_several_references_needs_the_methods_of_one():
    several = RolePlan(frozenset({"actor", "rollout", "ref.old", "ref.new"}), {"ref": CriticWorker})
    with pytest.raises(ConfigError, match="the worker class lacks methods") as caught:
        plan_groups(Placement({"a": [1]}, {Role.ActorRolloutRef: "a"}), several)
    assert caught.value.field == "trainer.worker_classes.ref"
    assert caught.value.got == "CriticWorker without compute_ref_log_prob"


def test_a_users_own_workers_take_part_in_the_loop(lab, own):
    words = "GAE A.use_kl_loss=true"
    ours = lab.run("ours", words)
    classes = f"W.critic={own}:OwnCritic W.reward={own}:Constant W.rollout={own}:Plain"
    run = lab.run("theirs", words, classes)
    assert run.trainer.roles.critic.where() == [(0, 1)]
    gap = run.rows[0]["critic/values/mean"] - ours.rows[0]["critic/values/mean"]
    assert gap == pytest.approx(7, abs=1e-5)
    assert run.rows[0]["reward/mean"] == 0.25
    assert run.samples(1)["tokens"] == ours.samples(1)["tokens"]


REFUSED = """
critic | Incomplete | Incomplete without update_critic, save_checkpoint, load_checkpoint
critic | Incomplete | @register: compute_values, update_critic
rollout | Constant | Constant without generate_sequences, load_weights
data | Incomplete | describe, train_batch, val_batch
critic | LATER | Own without begin_save, check_save
critic | NoWorker | OwnCritic
critic | OwnCritik | did you mean 'OwnCritic'?
"""


@pytest.mark.parametrize(("role", "name", "said"), rows(REFUSED))
def test_a_class_that_cannot_play_its_role_is_refused_before_anything_starts(lab, own, role, name, said):
    key = "trainer.async_save" if name == "LATER" else f"trainer.worker_classes.{role}"
    if name == "LATER":
        name = lab.worker("compute_values update_critic save_checkpoint load_checkpoint")
    word = name if ":" in name else f"{own}:{name}"
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        lab.run("refused", f"GAE trainer.async_save=true W.{role}={word}")
    assert key in str(caught.value)
    assert not (lab.folder / "refused").exists()


def test_a_module_that_cannot_be_imported_is_named():
    with pytest.raises(ConfigError, match=r"nowhere\.py:Worker: the module could not be imported"):
        load_classes({"critic": "nowhere.py:Worker"})
