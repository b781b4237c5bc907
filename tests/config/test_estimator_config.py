"""What an advantage estimator requires of other keys."""

from __future__ import annotations

import pytest

N = "actor_rollout_ref.rollout.n"
KL = "algorithm.use_kl_in_reward"


def test_pass_at_k_needs_two_samples(errors):
    found = errors("algorithm.adv_estimator=grpo_passk")[N]
    assert found.message == "grpo_passk compares the two best samples of a prompt, and there is only one"
    assert (found.got, found.expected) == (1, ">= 2")


@pytest.mark.parametrize(
    ("estimator", "reason"),
    [
        ("gdpo", "components of the reward"),
        ("maxrl", "success rate"),
    ],
)
def test_kl_in_a_reward_that_is_not_a_plain_sum(load, errors, estimator, reason):
    words = (f"algorithm.adv_estimator={estimator}", f"{N}=4")
    found = errors(*words, f"{KL}=true")[KL]
    assert reason in found.message and found.expected == "false"
    assert found.remedy == "set actor_rollout_ref.actor.use_kl_loss=true instead"
    assert load(*words, "actor_rollout_ref.actor.use_kl_loss=true").notices == ()


@pytest.mark.parametrize("alias", ["grpo_vectorized", "rloo_vectorized"])
def test_verls_second_names(load, alias):
    config = load(f"algorithm.adv_estimator={alias}", f"{N}=4").config
    assert config.algorithm.adv_estimator == alias.removesuffix("_vectorized")


@pytest.mark.parametrize(("estimator", "critic"), [("vtrace", True), ("maxrl", False), ("remax", False)])
def test_a_critic_is_there_where_values_are_read(load, estimator, critic):
    config = load(f"algorithm.adv_estimator={estimator}", f"{N}=4").config
    assert config.needs_critic == ("critic" in config.roles) == critic
