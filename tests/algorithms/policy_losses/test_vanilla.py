from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.policy_losses.vanilla import vanilla
from tandem.errors import ConfigError


def slow_token(log_ratio: float, advantage: float, low: float, high: float, c: float) -> dict[str, float]:
    """Return the loss of one token by the equations, and its slope with respect to the log-prob."""
    ratio = math.exp(log_ratio)
    within = min(max(ratio, 1 - low), 1 + high)
    plain, clipped = -ratio * advantage, -within * advantage
    loss, slope = max(plain, clipped), plain if plain >= clipped else 0.0
    dual = advantage < 0 and loss > -c * advantage
    if dual:
        loss, slope = -c * advantage, 0.0
    return {"loss": loss, "slope": slope, "clipped": float(clipped > plain), "dual": float(dual)}


@pytest.mark.equation("policy_losses/vanilla")
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(1, 60),
    low=st.floats(0.01, 0.9),
    high=st.floats(0.01, 0.9),
    c=st.floats(1.01, 5.0),
)
@settings(deadline=None, max_examples=100)
def test_values_gradients_and_metrics(seed: int, count: int, low: float, high: float, c: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs, old, advantages = torch.randn(3, count, generator=generator, dtype=torch.float64).unbind()
    log_probs.requires_grad_()
    losses, metrics = vanilla(
        log_probs, old, advantages, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=c
    )
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    for i in range(count):
        log_ratio = log_probs[i].item() - old[i].item()
        want = slow_token(log_ratio, advantages[i].item(), low, high, c)
        assert losses[i].item() == pytest.approx(want["loss"], rel=1e-9, abs=1e-12)
        assert gradient[i].item() == pytest.approx(want["slope"], rel=1e-9, abs=1e-12)
        assert metrics["clip_fraction"][i].item() == want["clipped"]
        assert metrics["clip_fraction_lower"][i].item() == want["dual"]
        assert metrics["ppo_kl"][i].item() == pytest.approx(-log_ratio)
    assert not any(metric.requires_grad for metric in metrics.values())


@pytest.mark.equation("policy_losses/vanilla")
def test_on_policy_gradient_is_that_of_reinforce() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([2.0, -3.0, 0.0], dtype=torch.float64)
    losses, metrics = vanilla(log_probs, log_probs.detach(), advantages)
    assert torch.equal(losses.detach(), -advantages)
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), log_probs)[0], -advantages)
    assert all(metric.abs().max() == 0 for metric in metrics.values())


@pytest.mark.equation("policy_losses/vanilla")
def test_each_bound_by_hand() -> None:
    ratios = torch.tensor([1.5, 0.5, 1.5, 0.5, 10.0]).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])
    losses, metrics = vanilla(
        ratios, torch.zeros(5), advantages, clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=4.0
    )
    torch.testing.assert_close(losses, torch.tensor([-1.3, -0.5, 1.5, 0.9, 4.0]))
    assert metrics["clip_fraction"].tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert metrics["clip_fraction_lower"].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_far_apart_policies_stay_finite() -> None:
    log_probs = torch.tensor([0.0, -500.0], requires_grad=True)
    losses, _ = vanilla(log_probs, torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, 1.0]))
    assert losses.tolist() == pytest.approx([3.0, 0.0], abs=1e-8)
    assert torch.autograd.grad(losses.sum(), log_probs)[0].isfinite().all()


def test_a_dual_clip_that_would_cut_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match="clip_ratio_c"):
        vanilla(torch.zeros(1), torch.zeros(1), torch.zeros(1), clip_ratio_c=1.0)
