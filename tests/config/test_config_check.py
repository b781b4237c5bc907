"""The check of a loaded config: declared conditions and needs, and rules that read an invalid value."""

from __future__ import annotations

import pytest

from tandem.config.check import check
from tandem.config.root import TrainConfig
from tandem.config.rules import RULES
from tandem.config.section import InvalidValueRead
from tandem.config.view import changed, path, root, view_of

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def test_a_view_reads_as_the_config_does(load):
    config = load("trainer.resource_pools={a: [2], b: [1]}", "trainer.placement.critic=b").config
    view = view_of(config, frozenset({"trainer.placement"}), frozenset({"trainer.seed"}))
    assert isinstance(view, TrainConfig) and view.needs_critic and view.roles == config.roles
    assert view.trainer.pools == config.trainer.pools and view.trainer.devices_of("critic") == 1
    assert path(view.trainer.cluster, "address") == "trainer.cluster.address"
    assert path(config.trainer.cluster, "address") == "address"
    assert changed(view.trainer, "placement") and not changed(view.trainer, "resource_pools")
    assert root(view.actor_rollout_ref.actor.optim).data.max_prompt_length == 512
    with pytest.raises(InvalidValueRead):
        _ = view.trainer.seed
    assert view.trainer.nnodes == 1


def test_a_rule_that_reads_a_wrong_value_is_silent_from_there_on(load):
    def rule(config):
        yield "before"
        yield f"seed {config.trainer.seed}"

    config = load().config
    assert check(config, frozenset(), frozenset(), [rule]).notices == ["before", "seed 0"]
    assert check(config, frozenset(), frozenset({"trainer.seed"}), [rule]).notices == ["before"]


def test_an_inherited_value_is_looked_at_where_it_was_set(errors):
    """An inherited value is checked once at its source if the source is used, otherwise at each heir."""
    phases = [f"{R}.log_prob_max_token_len_per_gpu", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"]
    source = f"{A}.ppo_max_token_len_per_gpu"
    used = [f"{A}.use_kl_loss=true", f"{source}=1000"]
    assert set(errors(*used, f"{A}.use_dynamic_bsz=true")) == {source}
    own = [f"{A}.use_dynamic_bsz=true", f"{phases[0]}=900"]
    assert set(errors(*used, *own)) == {source, phases[0]}
    by_tokens = [key.replace("max_token_len_per_gpu", "use_dynamic_bsz=true") for key in phases]
    assert set(errors(*used, *by_tokens)) == set(phases)


def test_every_command_has_rules():
    assert {root.__name__ for root in RULES} == {
        "TrainConfig", "SFTConfig", "RMConfig", "GenerateConfig", "EvalConfig",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "wrong"),
    [
        (
            ("algorithm.adv_estimator=grpoo", "critic.ulysses_sequence_parallel_size=3"),
            "algorithm.adv_estimator",
        ),
        (("algorithm.adv_estimator=grpoo", "critic.fsdp_config.fsdp_size=3"), "algorithm.adv_estimator"),
        ((f"{R}.val_kwargs.n=none", f"{R}.val_kwargs.do_sample=false"), f"{R}.val_kwargs.n"),
        ((f"{A}.use_kl_loss=maybe", "actor_rollout_ref.ref.fsdp_config.fsdp_size=3"), f"{A}.use_kl_loss"),
        (
            ("trainer.placement.rollout=nowhere", "trainer.placement.actor=global_pool"),
            "trainer.placement.rollout",
        ),
    ],
)
def test_only_the_wrong_value_is_reported(errors, overrides, wrong):
    assert list(errors(*overrides)) == [wrong]


def test_what_was_found_before_a_wrong_value_was_read_is_said(errors):
    found = errors("critic.fsdp_config.tensor_parallel_size=3", "reward_model.enable=perhaps")
    assert set(found) == {"critic.fsdp_config.tensor_parallel_size", "reward_model.enable"}


@pytest.mark.parametrize(
    ("overrides", "field", "most"),
    [
        ((f"{R}.n=1000000000000",), f"{R}.n", "9,765"),
        ((f"{R}.n=9766",), f"{R}.n", "9,765"),
        (("data.train_batch_size=8", f"{A}.ppo_mini_batch_size=8", f"{R}.n=2000000"), f"{R}.n", "1,250,000"),
        ((f"{R}.n_schedule={{1: 4, 9: 1000000}}",), f"{R}.n_schedule", "9,765"),
        (("data.train_batch_size=1000000000",), "data.train_batch_size", "10,000,000"),
        (("data.train_batch_size=5000000", f"{R}.n=8"), "data.train_batch_size", "1,250,000"),
        (
            ("algorithm.filter_groups.enable=true", "data.gen_batch_size=90000000", f"{R}.n=2"),
            "data.gen_batch_size", "5,000,000",
        ),
        (
            ("data.val_batch_size=90000000", "data.val_files=${data.train_files}"),
            "data.val_batch_size", "10,000,000",
        ),
        (
            (f"{R}.val_kwargs.n=99999999", f"{R}.val_kwargs.do_sample=true", f"{R}.val_kwargs.temperature=1",
             "data.val_files=${data.train_files}"),
            f"{R}.val_kwargs.n", "10,000,000",
        ),
    ],
)  # fmt: skip
def test_more_responses_than_can_be_held_are_refused(errors, overrides, field, most):
    (error,) = errors("algorithm.adv_estimator=grpo", *overrides).values()
    assert error.field == field and "responses at once" in error.message
    assert f"at most {most}" in str(error.expected)


def test_as_many_responses_as_can_be_held_pass(load):
    assert load("algorithm.adv_estimator=grpo", f"{R}.n=9765").config.actor_rollout_ref.rollout.n == 9765
