"""Soft adaptive policy optimisation."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.registry import register_policy_loss
from tandem.algorithms.surrogate import log_ratio, require_positive


@register_policy_loss("sapo")
def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A sigmoid of the ratio in place of PPO's clip: the gradient fades as the policies part.

    Equation (rho = exp(log_probs - old_log_probs), the exponent clamped to [-20, 20]):

        tau = tau_pos  where A > 0,  tau_neg  else
        l = -(4 / tau) * sigmoid(tau * (rho - 1)) * A

    At rho = 1 the slope of the gate is one, so the first update is that of the plain policy gradient.

    When to use: several updates per batch, and mixtures of experts, where a hard clip throws away too much or
    too little. tau_neg above tau_pos lets negative advantages, which spread over the whole vocabulary, fade
    sooner. Usual aggregation: seq-mean-token-mean.
    Watch: `actor/gate` the mean of the gate's slope, 1 on policy, near 0 where the policies have parted;
    `actor/ppo_kl` how far the policy has moved since the samples were written.
    Cost: nothing.

    Args:
        tau_pos, tau_neg: how fast the gradient fades for positive and for other advantages, > 0.

    Returns:
        (N) losses, and per token: gate (the slope of the gate by rho, from 0 to 1), ppo_kl (-log rho).

    Raises:
        ConfigError: a tau that is not positive.

    Source: Gao et al. 2025, https://arxiv.org/abs/2511.20347, eq. 5 and 6.
    """
    require_positive("tau_pos", tau_pos)
    require_positive("tau_neg", tau_neg)
    difference = log_ratio(log_probs, old_log_probs, advantages)
    tau = torch.full_like(advantages, tau_neg).masked_fill_(advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (difference.exp() - 1))
    slope = (4 * gate * (1 - gate)).detach()
    return -(4 / tau) * gate * advantages, {"gate": slope, "ppo_kl": -difference.detach()}
