"""Divergence proximal policy optimisation by KL divergence."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.registry import register_policy_loss
from tandem.algorithms.trust_region import binary_kl, masked_policy_gradient


@register_policy_loss("dppo_kl")
def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A trust region in KL divergence instead of ratios: a token stops learning when it would leave it.

    Equation (p = exp(log_probs), q = exp(old_log_probs), rho = p / q with the exponent clamped to
    [-20, 20], sg stops the gradient):

        D = q * log(q / p) + (1 - q) * log((1 - q) / (1 - p))
        inside = (D <= high or p <= q)  where A > 0,  (D <= low or p >= q)  else
        l = -sg(min(rho, c) * inside) * A * log_probs

    D is KL(old || new) when all that matters is whether they choose this token (the paper's binary
    approximation); 1e-8 is added to both of 1 - q and 1 - p. A token beyond the bound still learns where its
    advantage leads it back.

    When to use: as `dppo_tv`; the divergence counts what happens to rare tokens more than the total
    variation does. The bounds are nats: the paper sets both to 0.05. Usual aggregation: token-mean.
    Watch: `actor/clip_fraction` tokens outside the trust region; `actor/clip_fraction_lower` tokens inside
    it whose ratio is cut to clip_ratio_c; `actor/ppo_kl` how far the policy has moved since the samples were
    written.
    Cost: nothing.

    Args:
        clip_ratio_low, clip_ratio_high: the greatest divergence of tokens that fall and that rise, nats.
        clip_ratio_c: bound of the ratio, > 0.

    Returns:
        (N) losses, and per token: clip_fraction, clip_fraction_lower, ppo_kl (-log rho).

    Raises:
        ConfigError: clip_ratio_c is not positive.

    Source: Qi et al. 2026, https://arxiv.org/abs/2602.04879, sections 4.3 and 4.4 (DPPO-Binary-KL).
    """
    now = log_probs.detach()
    divergence = binary_kl(old_log_probs, now)
    may_rise = (divergence <= clip_ratio_high) | (now <= old_log_probs)
    may_fall = (divergence <= clip_ratio_low) | (now >= old_log_probs)
    inside = torch.where(advantages > 0, may_rise, may_fall)
    return masked_policy_gradient(log_probs, old_log_probs, advantages, inside, clip_ratio_c)
