"""Expectations of verl 0.9.1's test_core_algos_on_cpu.py that also hold in Tandem.

docs/verl-tests.md lists those that do not hold, and why.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.algorithms.advantages.gae import gae
from tandem.algorithms.advantages.grpo import grpo
from tandem.algorithms.advantages.rloo import rloo
from tandem.algorithms.kl import kl_penalty
from tandem.algorithms.registry import ADVANTAGES, Advantages, AdvantageSpec, Registry, advantage_estimator
from tandem.errors import ConfigError

SIZES = [(64, 128, 5, 0), (128, 256, 8, 1), (512, 512, 10, 2)]  # samples, tokens, groups, seed


def doubled(token_level_rewards: Tensor, response_mask: Tensor) -> Advantages:
    return Advantages(token_level_rewards * 2, token_level_rewards * 2)


def plus_one(token_level_rewards: Tensor, response_mask: Tensor) -> Advantages:
    return Advantages(token_level_rewards + 1, token_level_rewards + 1)


def test_a_registered_function_is_found_and_unchanged() -> None:
    registry = Registry(AdvantageSpec)
    assert registry.register("test_estimator")(doubled) is doubled
    assert registry.find("test_estimator").fn is doubled


def test_the_same_function_may_be_registered_twice_and_no_other() -> None:
    registry = Registry(AdvantageSpec)
    for _ in range(2):
        registry.register("duplicate_test", "also")(doubled)
    assert registry.find("duplicate_test").fn is registry.find("also").fn is doubled
    for name in ("duplicate_test", "also"):
        with pytest.raises(ConfigError, match="already has this name"):
            registry.register(name)(plus_one)
    assert registry.find("duplicate_test").fn is doubled


def test_several_are_registered_side_by_side() -> None:
    registry = Registry(AdvantageSpec)
    registry.register("estimator1")(doubled)
    registry.register("estimator2")(plus_one)
    assert registry.names == ("estimator1", "estimator2")
    columns = {"token_level_rewards": torch.tensor([5.0]), "response_mask": torch.tensor([True])}
    found = [registry.find(name).fn(**columns).advantages.item() for name in registry.names]
    assert found == [10, 6]


def test_registered_names_are_found() -> None:
    assert advantage_estimator("gae").fn is gae
    assert {"gae", "vtrace"} <= set(ADVANTAGES.names)


@pytest.mark.parametrize("name", ["invalid_name", "GAE"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){name}.*advantage estimator"):
        advantage_estimator(name)


def test_values_of_a_tools_tokens_change_nothing() -> None:
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0], dtype=torch.bool)
    rewards = torch.tensor([0, 0, 0.1, 0.1, 0.1, 0, 0, 0.1, 1, 0, 0])
    fixed = torch.tensor([0, 0, 4.0, 5, 6, 0, 0, 7, 9, 0, 0])
    gamma, lam = torch.rand(2).tolist()
    first, second = (
        gae(
            rewards,
            torch.where(mask, fixed, 100 * torch.randn(11)),
            mask,
            torch.tensor([0, 11]),
            gamma=gamma,
            lam=lam,
        )
        for _ in range(2)
    )
    assert torch.equal(first.advantages, second.advantages)
    assert torch.equal(first.returns[mask], second.returns[mask])
    assert first.returns[8] == 1.0


def outcomes(samples: int, tokens: int, groups: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random rewards at about half of the tokens; each group has two samples or more."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(samples, tokens, generator=draw) < 0.5
    mask[:, -1] |= ~mask.any(1)
    rewards = torch.randn(samples, tokens, generator=draw) * mask
    group = torch.arange(groups).repeat_interleave(2)
    group = torch.cat((group, torch.randint(0, groups, (samples - 2 * groups,), generator=draw)))
    group = group[torch.randperm(samples, generator=draw)]
    return rewards.flatten(), mask.flatten(), torch.arange(samples + 1) * tokens, group


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["rloo", "grpo"])
def test_outcomes_against_a_loop_over_samples(name: str, size: tuple[int, int, int, int]) -> None:
    rewards, mask, offsets, group = outcomes(*size)
    found = (rloo if name == "rloo" else grpo)(rewards, mask, offsets, group)
    scores = rewards.double().view(size[:2]).sum(1)
    wanted = torch.empty_like(scores)
    for i, score in enumerate(scores):
        members = group == group[i]
        if name == "grpo":
            wanted[i] = (score - scores[members].mean()) / (scores[members].std() + 1e-6)
        else:
            wanted[i] = score - (scores[members].sum() - score) / (members.sum() - 1)
    per_token = torch.where(mask, wanted.repeat_interleave(size[1]), 0)
    torch.testing.assert_close(found.advantages.double(), per_token, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.returns, found.advantages)


def test_rewards_of_a_group_that_hardly_differ() -> None:
    """The deviation is not lost in rounding.

    In float32, the two rewards of the groups differ by 1.00136e-5 and 9.54e-6.
    """
    rewards = torch.tensor([1.0, 1.00001, 2.0, 2.00001])
    found = grpo(rewards, torch.ones(4, dtype=torch.bool), torch.arange(5), torch.tensor([0, 0, 1, 1]))
    halves = [(rewards[i + 1].double() - rewards[i].double()).item() / 2 for i in (0, 2)]
    sizes = [half / (half * 2**0.5 + 1e-6) for half in halves]
    wanted = torch.tensor([-sizes[0], sizes[0], -sizes[1], sizes[1]])
    torch.testing.assert_close(found.advantages, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["k1", "kl", "abs", "k3", "low_var_kl"])
def test_a_plus_keeps_the_value(kind: str) -> None:
    log_probs, reference = torch.randn(2, 32)
    log_probs.requires_grad_()
    assert torch.allclose(
        kl_penalty(log_probs, reference, f"{kind}+"), kl_penalty(log_probs, reference, kind)
    )


def test_a_plus_has_the_gradient_of_k2() -> None:
    log_probs, reference = torch.randn(2, 32)
    log_probs.requires_grad_()
    found, wanted = (
        torch.autograd.grad(kl_penalty(log_probs, reference, kind).sum(), log_probs)[0]
        for kind in ("k3+", "k2")
    )
    assert torch.allclose(found, wanted)
    assert torch.allclose(found, (log_probs - reference).detach())
