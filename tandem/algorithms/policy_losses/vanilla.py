"""PPO's clipped loss with separate lower and upper bounds and the dual clip.

Shapes: N is the number of tokens of all sequences together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.registry import register_policy_loss
from tandem.algorithms.surrogate import clipped_surrogate, log_ratio
from tandem.errors import ConfigError


@register_policy_loss("vanilla")
def vanilla(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's clipped loss per token, with separate lower and upper bounds and the dual clip.

    Equation (rho = exp(log_probs - old_log_probs), the exponent clamped to [-20, 20]):

        l = max(-rho * A, -clip(rho, 1 - low, 1 + high) * A)
        l = min(l, -c * A)                                     if A < 0 (dual clip)

    When to use: by default, unless you have a reason for another loss. It is the loss of PPO, GRPO, Dr. GRPO
        and DAPO (which uses clip_ratio_high=0.28). Usual aggregation: token-mean; seq-mean-token-mean for
        GRPO as published, seq-mean-token-sum-norm for Dr. GRPO.
    Watch: `actor/clip_fraction` is the share of tokens that the clip stops: 0 with one update per batch, a
        few percent with several; `actor/clip_fraction_lower` is the share of tokens that the dual clip stops;
        `actor/ppo_kl` is how far the policy has moved since the samples were written, nats per token.
    Cost: nothing.

    Args:
        log_probs: (N) fp32, nats, of the policy being trained; carries the gradient.
        old_log_probs: (N) fp32, nats, of the policy before this batch's updates.
        advantages: (N) fp32.
        clip_ratio_low: how far the ratio may fall below 1.
        clip_ratio_high: how far the ratio may rise above 1.
        clip_ratio_c: upper bound of the ratio if the advantage is negative, > 1.

    Returns:
        (N) losses, and the per-token metrics clip_fraction (1 if the clipped term is the larger),
        clip_fraction_lower (1 if the dual clip applies) and ppo_kl (-log rho).

    Raises:
        ConfigError: clip_ratio_c is not above 1.

    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7; two bounds, Yu et al. 2025 (DAPO),
        https://arxiv.org/abs/2503.14476, eq. 10; dual clip, Ye et al. 2020, https://arxiv.org/abs/1912.09729,
        eq. 5.
    """
    if clip_ratio_c <= 1:
        raise ConfigError("out of range", field="clip_ratio_c", got=clip_ratio_c, expected="> 1")
    difference = log_ratio(log_probs, old_log_probs, advantages)
    surrogate, clipped = clipped_surrogate(difference.exp(), advantages, clip_ratio_low, clip_ratio_high)
    bound = -advantages * clip_ratio_c
    bounded = (advantages < 0) & (surrogate > bound)
    metrics = {
        "clip_fraction": clipped.to(surrogate.dtype),
        "clip_fraction_lower": bounded.to(surrogate.dtype),
        "ppo_kl": -difference.detach(),
    }
    return torch.where(bounded, bound, surrogate), metrics
