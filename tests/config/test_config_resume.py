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


@pytest.mark.parametrize(
    ("name", "free"),
    [
        ("algorithm.adv_estimator", False), (f"{ACTOR}.optim.lr", False), ("data.train_batch_size", False),
        ("trainer.seed", False), ("trainer.critic_warmup", False), (f"{ACTOR}.fsdp_config.dtype", False),
        ("actor_rollout_ref.rollout.n", False), ("data.train_files", False), ("optim.lr", False),
        ("actor_rollout_ref.rollout.temperature", False), ("reward_model.enable", False),
        ("custom_reward_function.path", False), (f"{ACTOR}.clip_ratio", False),
        ("trainer.total_training_steps", True), ("trainer.logger", True), ("trainer.nnodes", True),
        ("trainer.timeouts.call", True), ("trainer.placement", True), ("data.val_files", True),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", True), ("use_dynamic_bsz", True),
        (f"{ACTOR}.fsdp_config.param_offload", True), ("actor_rollout_ref.rollout.val_kwargs.n", True),
        ("actor_rollout_ref.rollout.enforce_eager", True), ("micro_batch_size_per_gpu", True),
    ],
)  # fmt: skip
def test_which_keys_decide_what_is_learnt(name, free):
    found = {
        keys(root)[name].resumed != "refused"
        for root in (TrainConfig, SFTConfig, RMConfig)
        if name in keys(root)
    }
    assert found == {free}


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
