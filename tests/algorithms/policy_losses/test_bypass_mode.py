from __future__ import annotations

import pytest
import torch

from tandem.algorithms.policy_losses.bypass_mode import bypass_mode
from tandem.algorithms.policy_losses.vanilla import vanilla
from tandem.algorithms.registry import POLICY_LOSSES
from tandem.errors import ConfigError


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    log_probs, rollout, advantages = torch.randn(3, 40, generator=draw, dtype=torch.float64)
    return -log_probs.abs(), -rollout.abs(), advantages


@pytest.mark.equation("policy_losses/bypass_mode")
def test_ppo_clip_is_the_clipped_ratio_to_the_policy_that_sampled() -> None:
    log_probs, rollout, advantages = drawn()
    bounds = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 2.0}
    losses, observed = bypass_mode(log_probs, rollout, advantages, **bounds)
    wanted, metrics = vanilla(log_probs, rollout, advantages, **bounds)
    assert torch.equal(losses, wanted)
    assert set(observed) == set(metrics)


@pytest.mark.equation("policy_losses/bypass_mode")
def test_reinforce_is_the_score_function_times_the_advantage() -> None:
    log_probs, rollout, advantages = drawn()
    log_probs.requires_grad_()
    losses, observed = bypass_mode(log_probs, rollout, advantages, loss_type="reinforce")
    losses.sum().backward()
    wanted = [-a * p for a, p in zip(advantages.tolist(), log_probs.tolist(), strict=True)]
    assert losses.tolist() == pytest.approx(wanted)
    assert torch.equal(log_probs.grad, -advantages)
    assert torch.equal(observed["ppo_kl"], rollout - log_probs.detach())
    assert not observed["ppo_kl"].requires_grad


def test_another_loss_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="ppo_clip or reinforce"):
        bypass_mode(*drawn(), loss_type="dpo")
    assert "bypass_mode" in POLICY_LOSSES.names
