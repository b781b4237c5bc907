"""Clipped importance-sampling policy optimisation (CISPO).

Shapes: N is the number of tokens of all sequences together.
"""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.registry import register_policy_loss
from tandem.algorithms.surrogate import log_ratio


@register_policy_loss("cispo")
def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the REINFORCE loss weighted by the clipped ratio.

    The weight is bounded, but no token loses its gradient.

    Equation (rho = exp(log_probs - old_log_probs), the exponent clamped to [-20, 20]; sg stops the gradient):

        l = -sg(clip(rho, 1 - low, 1 + high)) * A * log_probs

    When to use: several updates per batch, if PPO's clip removes the gradient of rare but important tokens,
        such as tokens that start a reflection. The paper bounds the weight only from above (clip_ratio_low=1)
        and does not give the upper bound. Khatri et al. saw no difference between 4, 5 and 8
        (clip_ratio_high=3, 4 and 7). Usual aggregation: token-mean.
    Watch: `actor/clip_fraction` is the share of tokens whose weight is bounded (these tokens still learn);
        `actor/ppo_kl` is how far the policy has moved since the samples were written.
    Cost: nothing.

    Args:
        log_probs: (N) fp32, nats, of the policy being trained; carries the gradient.
        old_log_probs: (N) fp32, nats, of the policy before this batch's updates.
        advantages: (N) fp32.
        clip_ratio_low: how far the weight may fall below 1.
        clip_ratio_high: how far the weight may rise above 1.

    Returns:
        (N) losses, and the per-token metrics clip_fraction and ppo_kl (-log rho).

    Source: MiniMax 2025 (MiniMax-M1), https://arxiv.org/abs/2506.13585, section 3.1, eq. 4 and 5; the bounds,
        Khatri et al. 2025 (ScaleRL), https://arxiv.org/abs/2510.13786, appendix A.17.
    """
    difference = log_ratio(log_probs, old_log_probs, advantages).detach()
    ratio = difference.exp()
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    metrics = {"clip_fraction": (ratio != weight).to(ratio.dtype), "ppo_kl": -difference}
    return -weight * advantages * log_probs, metrics
