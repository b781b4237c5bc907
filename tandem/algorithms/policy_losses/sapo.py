"""Soft adaptive policy optimisation (SAPO).

Shapes: N is the number of tokens of all sequences together.
"""

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
    """Return a loss with a sigmoid of the ratio instead of PPO's clip.

    The gradient fades as the two policies move apart.

    Equation (rho = exp(log_probs - old_log_probs), the exponent clamped to [-20, 20]):

        tau = tau_pos  if A > 0,  tau_neg  otherwise
        l = -(4 / tau) * sigmoid(tau * (rho - 1)) * A

    At rho = 1 the slope of the sigmoid gate is 1, so the first update equals that of the plain policy
    gradient.

    When to use: several updates per batch, and mixtures of experts, if a hard clip removes too much or too
        little gradient. With tau_neg above tau_pos, negative advantages fade sooner; their gradient spreads
        over the whole vocabulary. Usual aggregation: seq-mean-token-mean.
    Watch: `actor/gate` is the mean slope of the gate: 1 on-policy, near 0 if the policies have moved apart;
        `actor/ppo_kl` is how far the policy has moved since the samples were written.
    Cost: nothing.

    Args:
        log_probs: (N) fp32, nats, of the policy being trained; carries the gradient.
        old_log_probs: (N) fp32, nats, of the policy before this batch's updates.
        advantages: (N) fp32.
        tau_pos: how fast the gradient fades for positive advantages, > 0.
        tau_neg: how fast the gradient fades for all other advantages, > 0.

    Returns:
        (N) losses, and the per-token metrics gate (slope of the gate with respect to rho, from 0 to 1) and
        ppo_kl (-log rho).

    Raises:
        ConfigError: tau_pos or tau_neg is not positive.

    Source: Gao et al. 2025, https://arxiv.org/abs/2511.20347, eq. 5 and 6.
    """
    require_positive("tau_pos", tau_pos)
    require_positive("tau_neg", tau_neg)
    difference = log_ratio(log_probs, old_log_probs, advantages)
    tau = torch.full_like(advantages, tau_neg).masked_fill_(advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (difference.exp() - 1))
    slope = (4 * gate * (1 - gate)).detach()
    return -(4 / tau) * gate * advantages, {"gate": slope, "ppo_kl": -difference.detach()}
