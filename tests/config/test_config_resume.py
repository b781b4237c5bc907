from typing import Any

import pytest

from tandem.config.load import load_train_config
from tandem.config.resume import Change, changes, side_by_side
from tandem.config.root import TrainConfig
from tandem.config.schema import keys
from tandem.config.supervised import RMConfig, SFTConfig
from tandem.config.written import to_dict

ACTOR = "actor_rollout_ref.actor"


@pytest.fixture
def words(required: list[str]) -> list[str]:
    return [*required, "algorithm.adv_estimator=grpo"]


def _config(words: list[str], *more: str) -> TrainConfig:
    return load_train_config(None, [*words, *more]).config


def _found(words: list[str], *more: str, then: dict[str, Any] | None = None) -> list[Change]:
    return changes(to_dict(_config(words)) if then is None else then, _config(words, *more))


def test_the_same_config_has_no_changes(words):
    assert _found(words, "trainer.resume_mode=disable", "trainer.resume_with_changes=true") == []


def test_a_change_is_of_one_key_though_others_inherit_it(words):
    assert _found(words, "trainer.seed=3") == [Change("trainer.seed", "0", "3")]
    name = "data.apply_chat_template_kwargs"
    assert _found(words, name + "={a: 1}") == [Change(name, "{}", '{"a": 1}')]


def test_a_folder_of_an_older_version(words):
    """A missing key counts as unchanged, and a key with its old name is compared."""
    then = to_dict(_config(words))
    del then["actor_rollout_ref"]["actor"]["clip_ratio_c"]
    del then["actor_rollout_ref"]["actor"]["optim"]["clip_grad"]
    then["actor_rollout_ref"]["actor"]["grad_clip"] = 0.5
    assert _found(words, f"{ACTOR}.clip_ratio_c=4.0", then=then) == [
        Change(f"{ACTOR}.optim.clip_grad", "0.5", "1.0")
    ]


FIXED = f"""
algorithm.adv_estimator {ACTOR}.optim.lr data.train_batch_size trainer.seed trainer.critic_warmup
{ACTOR}.fsdp_config.dtype actor_rollout_ref.rollout.n data.train_files optim.lr
actor_rollout_ref.rollout.temperature reward_model.enable custom_reward_function.path {ACTOR}.clip_ratio
"""
FREE = f"""
trainer.total_training_steps trainer.logger trainer.nnodes trainer.timeouts.call trainer.placement
data.val_files {ACTOR}.ppo_micro_batch_size_per_gpu use_dynamic_bsz {ACTOR}.fsdp_config.param_offload
actor_rollout_ref.rollout.val_kwargs.n actor_rollout_ref.rollout.enforce_eager micro_batch_size_per_gpu
"""


@pytest.mark.parametrize(("names", "free"), [(FIXED, False), (FREE, True)])
def test_which_keys_decide_what_is_learnt(names, free):
    known = [keys(root) for root in (TrainConfig, SFTConfig, RMConfig)]
    for name in names.split():
        assert {of[name].resumed != "refused" for of in known if name in of} == {free}, name


def test_keys_that_say_which_run_goes_on_are_silent():
    silent = {name for name, key in keys(TrainConfig).items() if key.resumed == "silent"}
    names = ("resume_mode", "resume_from_path", "resume_with_changes", "default_local_dir")
    assert silent == {f"trainer.{name}" for name in names}


def test_side_by_side():
    table = side_by_side([Change("a.b", "1", "22"), Change("long.key", '"grpo"', '"rloo"')])
    assert table.splitlines() == [
        "  key       then    now",
        "  a.b       1       22",
        '  long.key  "grpo"  "rloo"',
    ]


def test_an_aggregation_left_to_the_loss_is_the_one_that_was_named(words):
    then = to_dict(_config(words))
    then["actor_rollout_ref"]["actor"]["loss_agg_mode"] = then["critic"]["loss_agg_mode"] = "token-mean"
    assert _found(words, then=then) == []
    gspo = f"{ACTOR}.policy_loss.loss_mode=gspo"
    changed = {change.key: (change.then, change.now) for change in _found(words, gspo, then=then)}
    assert changed[f"{ACTOR}.loss_agg_mode"] == ('"token-mean"', '"seq-mean-token-mean"')
    assert "critic.loss_agg_mode" not in changed
