"""The keys of the KL terms and of the reference policy: estimators, needs of an exact KL, resets."""

from __future__ import annotations

import pytest

from tandem.config import tables

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
LOSS, IN_REWARD = f"{A}.use_kl_loss=true", "algorithm.use_kl_in_reward=true"
EXACT_LOSS, EXACT_REWARD = f"{A}.kl_loss_type=full", "algorithm.kl_penalty=full"


@pytest.mark.parametrize("kind", [*tables.KL_KINDS, "full", "my.module:kl", "my.module:kl+"])
def test_every_estimator_goes_in_both_places(load, kind):
    config = load(LOSS, IN_REWARD, f"{A}.kl_loss_type={kind}", f"algorithm.kl_penalty={kind}").config
    assert config.actor_rollout_ref.actor.kl_loss_type == config.algorithm.kl_penalty == kind


def test_an_estimator_that_is_not_there(errors, tmp_path):
    found = errors(LOSS, IN_REWARD, f"{A}.kl_loss_type=k3++", f"algorithm.kl_penalty={tmp_path}/no.py:kl")
    assert found[f"{A}.kl_loss_type"].remedy in ("did you mean k3+?", "did you mean k3?")
    assert found["algorithm.kl_penalty"].message == "this file does not exist"


@pytest.mark.parametrize(
    ("words", "exact"),
    [
        ((LOSS, EXACT_LOSS), True),
        ((IN_REWARD, EXACT_REWARD), True),
        ((LOSS, IN_REWARD, EXACT_REWARD), True),
        ((LOSS, IN_REWARD), False),
        ((), False),
    ],
)
def test_when_hidden_states_of_the_reference_are_needed(load, words, exact):
    assert load(*words).config.exact_kl is exact


@pytest.mark.parametrize("role", [A, R])
@pytest.mark.parametrize(
    ("words", "kind"),
    [((LOSS, EXACT_LOSS), f"{A}.kl_loss_type"), ((LOSS, IN_REWARD, EXACT_REWARD), "algorithm.kl_penalty")],
)
def test_a_model_in_stages_has_no_exact_kl(errors, role, words, kind):
    stages = f"{role}.fsdp_config.pipeline_parallel_size"
    found = errors(*words, f"{stages}=2", "trainer.n_gpus_per_node=2")[stages]
    assert found.got == f"2 with {kind}=full"
    assert found.remedy == f"set {stages}=1, or use an estimator such as {kind}=k3+"


def test_stages_and_estimates_go_together(load):
    load(LOSS, f"{A}.fsdp_config.pipeline_parallel_size=2", "trainer.n_gpus_per_node=2")


def test_the_reference_is_never_reset_by_itself(load):
    assert load().config.actor_rollout_ref.ref.reset_interval == 0
    loaded = load(f"{R}.reset_interval=100", f"{R}.reset_optimizer=true", LOSS)
    assert loaded.config.actor_rollout_ref.ref.reset_interval == 100 and loaded.notices == ()


def test_a_reset_of_what_is_not_there(load, errors):
    (notice,) = (n for n in load(f"{R}.reset_interval=100").notices if "reset_interval" in n)
    assert "no effect" in notice
    assert "reset_interval" in next(iter(errors(f"{R}.reset_interval=-1", LOSS)))


def test_an_optimizer_that_is_never_reset(errors):
    assert errors(f"{R}.reset_optimizer=true", LOSS)[f"{R}.reset_optimizer"].message == "has no effect"


def test_the_base_of_adapters_is_reset_only_where_it_is_a_copy_of_its_own(load, errors):
    words = (LOSS, f"{R}.reset_interval=10", "actor_rollout_ref.model.lora_rank=4")
    found = errors(*words)[f"{R}.reset_interval"]
    assert found.got == "10 with actor_rollout_ref.model.lora_rank=4"
    pools = "trainer.resource_pools={a: [1], b: [1]}", "trainer.placement={actor_rollout: a, ref: b}"
    assert load(*words, *pools).config.actor_rollout_ref.ref.reset_interval == 10


def test_components_by_name(load, errors):
    keys = "algorithm.gdpo_reward_keys"
    assert load().config.algorithm.gdpo_reward_keys == ()
    loaded = load(f"{keys}=[format, accuracy]", "algorithm.adv_estimator=my.module:estimator")
    assert loaded.config.algorithm.gdpo_reward_keys == ("format", "accuracy")
    assert errors(f"{keys}=[format]", "algorithm.adv_estimator=grpo")[keys].message == "has no effect"


def test_the_switch_of_verl_for_squared_probabilities_is_settled(load):
    loaded = load(f"{A}.calculate_sum_pi_squared=true")
    assert "computed whenever the advantage estimator reads it" in loaded.notices[0]
