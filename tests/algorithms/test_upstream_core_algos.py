"""Expectations of verl 0.9.1's test_core_algos_on_cpu.py that hold; docs/verl-tests.md lists the others."""

import pytest
import torch

from tandem.algorithms.advantages.gae import gae
from tandem.algorithms.kl import kl_penalty
from tandem.algorithms.registry import ADVANTAGES, Advantages, AdvantageSpec, Registry, advantage_estimator
from tandem.errors import ConfigError
from tests.algorithms.advantages import slow_advantages


def doubled(token_level_rewards, response_mask):
    return Advantages(token_level_rewards * 2, token_level_rewards * 2)


def plus_one(token_level_rewards, response_mask):
    return Advantages(token_level_rewards + 1, token_level_rewards + 1)


def test_functions_are_registered_side_by_side_and_one_function_twice():
    registry = Registry(AdvantageSpec)
    assert registry.register("estimator2")(plus_one) is plus_one
    for _ in range(2):
        assert registry.register("estimator1", "also")(doubled) is doubled
    assert registry.names == ("estimator1", "estimator2")
    columns = {"token_level_rewards": torch.tensor([5.0]), "response_mask": torch.tensor([True])}
    names = (*registry.names, "also")
    assert [registry.find(name).fn(**columns).advantages.item() for name in names] == [10, 6, 10]
    for name in ("estimator1", "also"):
        with pytest.raises(ConfigError):
            registry.register(name)(plus_one)
        assert registry.find(name).fn is doubled


def test_registered_names_are_found_and_others_refused():
    assert advantage_estimator("gae").fn is gae
    assert {"gae", "vtrace"} <= set(ADVANTAGES.names)
    for name in ("invalid_name", "GAE"):
        with pytest.raises(ValueError, match=f"(?s){name}.*advantage estimator"):
            advantage_estimator(name)


def test_values_of_a_tools_tokens_change_nothing():
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0]) > 0
    rewards = torch.tensor([0, 0, 0.1, 0.1, 0.1, 0, 0, 0.1, 1, 0, 0])
    fixed, offsets = torch.tensor([0, 0, 4.0, 5, 6, 0, 0, 7, 9, 0, 0]), torch.tensor([0, 11])
    options = dict(zip(("gamma", "lam"), torch.rand(2).tolist(), strict=True))
    values = [torch.where(mask, fixed, 100 * torch.randn(11)) for _ in range(2)]
    first, second = (gae(rewards, each, mask, offsets, **options) for each in values)
    assert torch.equal(first.advantages, second.advantages)
    assert torch.equal(first.returns[mask], second.returns[mask])
    assert first.returns[8] == 1.0


@pytest.mark.parametrize(("samples", "tokens", "groups"), [(64, 128, 5), (128, 256, 8), (512, 512, 10)])
@pytest.mark.parametrize(("name", "options"), [("rloo", {}), ("grpo", {"norm_adv_by_std_in_grpo": True})])
def test_outcomes_against_a_loop_over_samples(name, options, samples, tokens, groups):
    draw = torch.Generator().manual_seed(samples)
    mask = torch.rand(samples, tokens, generator=draw) < 0.5
    rewards = torch.randn(samples, tokens, generator=draw) * mask
    group = torch.cat((torch.arange(groups).repeat(2), torch.randint(0, groups, (samples - 2 * groups,))))
    columns = {"token_level_rewards": rewards.flatten(), "response_mask": mask.flatten(), "group": group}
    columns["offsets"] = torch.arange(samples + 1) * tokens
    found, (wanted, _) = (
        advantage_estimator(name)(columns),
        getattr(slow_advantages, name)(columns, **options),
    )
    torch.testing.assert_close(found.advantages.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.returns, found.advantages)


def test_rewards_of_a_group_that_hardly_differ():
    """In float32, the two rewards of the groups differ by 1.00136e-5 and 9.54e-6."""
    rewards, ones = torch.tensor([1.0, 1.00001, 2.0, 2.00001]), torch.ones(4, dtype=torch.bool)
    columns = {"token_level_rewards": rewards, "response_mask": ones, "offsets": torch.arange(5)}
    found = advantage_estimator("grpo")(columns | {"group": torch.tensor([0, 0, 1, 1])})
    half = rewards.double().diff()[::2] / 2
    size = half / (half * 2**0.5 + 1e-6)
    wanted = torch.stack((-size, size), 1).flatten().float()
    torch.testing.assert_close(found.advantages, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["k1", "kl", "abs", "k3", "low_var_kl"])
def test_a_plus_keeps_the_value_and_has_the_gradient_of_k2(kind):
    log_probs, reference = torch.randn(2, 32)
    log_probs.requires_grad_()
    found, plain, k2 = (kl_penalty(log_probs, reference, each) for each in (f"{kind}+", kind, "k2"))
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), log_probs) for each in (found, k2)))
