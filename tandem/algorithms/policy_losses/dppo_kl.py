"""Divergence proximal policy optimisation (DPPO) with a KL divergence.

Shapes: N is the number of tokens of all sequences together.
"""

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
    """Return the policy gradient loss with a trust region in KL divergence instead of ratios.

    A token stops learning if its update would leave the trust region.

    Equation (p = exp(log_probs), q = exp(old_log_probs), rho = p / q with the exponent clamped to [-20, 20];
    sg stops the gradient):

        D = q * log(q / p) + (1 - q) * log((1 - q) / (1 - p))
        inside = (D <= high or p <= q)  if A > 0,  (D <= low or p >= q)  otherwise
        l = -sg(min(rho, c) * inside) * A * log_probs

    D is KL(old || new) if only two outcomes are distinguished: this token, or any other token (the paper's
    binary approximation). 1e-8 is added to both 1 - q and 1 - p. A token beyond the bound still learns if its
    advantage moves it back towards the trust region.

    When to use: like `dppo_tv`. The KL divergence gives more weight to changes of rare tokens than the total
        variation does. The bounds are in nats: the paper sets both to 0.05. Usual aggregation: token-mean.
    Watch: `actor/clip_fraction` is the share of tokens outside the trust region; `actor/clip_fraction_lower`
        is the share of tokens inside it whose ratio is cut to clip_ratio_c; `actor/ppo_kl` is how far the
        policy has moved since the samples were written.
    Cost: nothing.

    Args:
        log_probs: (N) fp32, nats, of the policy being trained; carries the gradient.
        old_log_probs: (N) fp32, nats, of the policy before this batch's updates.
        advantages: (N) fp32.
        clip_ratio_low: maximum divergence of tokens whose probability falls, nats.
        clip_ratio_high: maximum divergence of tokens whose probability rises, nats.
        clip_ratio_c: upper bound of the ratio, > 0.

    Returns:
        (N) losses, and the per-token metrics clip_fraction, clip_fraction_lower and ppo_kl (-log rho).

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
