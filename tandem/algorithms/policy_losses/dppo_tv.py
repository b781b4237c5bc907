"""Divergence proximal policy optimisation (DPPO) with the total variation.

Shapes: N is the number of tokens of all sequences together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.registry import register_policy_loss
from tandem.algorithms.trust_region import masked_policy_gradient


@register_policy_loss("dppo_tv")
def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the policy gradient loss with a trust region in probabilities instead of ratios.

    A token stops learning if its update would move the distribution too far, not if its ratio is large.

    Equation (p = exp(log_probs), q = exp(old_log_probs), rho = p / q with the exponent clamped to [-20, 20];
    sg stops the gradient):

        inside = p - q <= high  if A > 0,  q - p <= low  otherwise
        l = -sg(min(rho, c) * inside) * A * log_probs

    |p - q| is the total variation between the two policies if only two outcomes are distinguished: this
    token, or any other token (the paper's binary approximation).

    When to use: instead of PPO's clip, which stops rare tokens needlessly and lets likely tokens drift. The
        bounds are differences of probabilities: the paper sets both to 0.15 or 0.2, and bounds the ratio at 5
        or not at all. In the paper, q is the sampling policy; to get this, use a rollout correction in bypass
        mode. Usual aggregation: token-mean.
    Watch: `actor/clip_fraction` is the share of tokens outside the trust region; `actor/clip_fraction_lower`
        is the share of tokens inside it whose ratio is cut to clip_ratio_c; `actor/ppo_kl` is how far the
        policy has moved since the samples were written.
    Cost: nothing.

    Args:
        log_probs: (N) fp32, nats, of the policy being trained; carries the gradient.
        old_log_probs: (N) fp32, nats, of the policy before this batch's updates.
        advantages: (N) fp32.
        clip_ratio_low: how far a token's probability may fall, in [0, 1].
        clip_ratio_high: how far a token's probability may rise, in [0, 1].
        clip_ratio_c: upper bound of the ratio, > 0.

    Returns:
        (N) losses, and the per-token metrics clip_fraction, clip_fraction_lower and ppo_kl (-log rho).

    Raises:
        ConfigError: clip_ratio_c is not positive.

    Source: Qi et al. 2026, https://arxiv.org/abs/2602.04879, sections 4.3 and 4.4 (DPPO-Binary-TV).
    """
    rise = (log_probs.exp() - old_log_probs.exp()).detach()
    inside = torch.where(advantages > 0, rise <= clip_ratio_high, rise >= -clip_ratio_low)
    return masked_policy_gradient(log_probs, old_log_probs, advantages, inside, clip_ratio_c)
