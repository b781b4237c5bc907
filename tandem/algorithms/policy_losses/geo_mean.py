"""Geometric-mean policy optimisation (GMPO).

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.masked import require_same_shape, segment_mean, spread
from tandem.algorithms.registry import register_policy_loss
from tandem.algorithms.surrogate import log_ratio

_LEAST = 1e-10
"""Minimum of an importance weight, so that one token with weight 0 does not set its sequence's loss to 0."""


@register_policy_loss("geo_mean", "gmpo")
def geo_mean(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    rollout_is_weights: Tensor,
    response_mask: Tensor,
    offsets: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the GMPO loss: the geometric mean of each sequence's clipped ratios (GRPO: arithmetic mean).

    Equation (d_it = log_probs - old_log_probs, clamped to [-20, 20]; w_it are the rollout_is_weights, at
    least 1e-10; T_i is the number of response tokens in sequence i; A_i is the mean of its advantages):

        c_it = min(d_it, high)  if A_it > 0,  max(d_it, -low)  if A_it < 0,  0  otherwise
        l_it = l_i = -A_i * exp(1 / T_i * sum_t (c_it + log w_it))

    Every token has the loss of its sequence, so their mean is that loss. A sequence's weight is the geometric
    mean of its tokens' weights; a masked token (w = 0) subtracts 23 / T_i nats. Beyond 20 nats a token has no
    gradient, which bounds the loss; verl has no such bound.

    When to use: if single tokens with extreme ratios make GRPO unstable. All tokens of a sequence must have
        the same advantage. The bounds are in nats: the paper sets both to 0.4. Usual aggregation:
        seq-mean-token-mean, as in the paper; other modes weigh the sequences' losses by length.
    Watch: `actor/clip_fraction` is the share of tokens at a bound; `actor/clip_fraction_lower` counts only
        tokens with a negative advantage; `actor/ppo_kl` is how far the policy has moved since sampling.
    Cost: nothing.

    Args:
        log_probs: (N) fp32, nats, of the policy being trained; carries the gradient.
        old_log_probs: (N) fp32, nats, of the policy before this batch's updates.
        advantages: (N) fp32, one number per sequence, repeated at its tokens.
        rollout_is_weights: (N) importance weights of the rollout correction; all 1 without it.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        clip_ratio_low: how far a token's log-ratio may fall below 0, nats.
        clip_ratio_high: how far a token's log-ratio may rise above 0, nats.

    Returns:
        (N) losses, and per token clip_fraction (1 at a bound), clip_fraction_lower (if A < 0), ppo_kl (-d).

    Source: Zhao et al. 2025, https://arxiv.org/abs/2507.20673, eq. 4, clipped token by token.
    """
    require_same_shape(advantages, response_mask)
    difference = log_ratio(log_probs, old_log_probs, advantages)
    rises, falls = advantages > 0, advantages < 0
    bounded = torch.where(rises, difference.clamp(max=clip_ratio_high), difference.clamp(min=-clip_ratio_low))
    bounded = torch.where(rises | falls, bounded, 0)
    logs = bounded + rollout_is_weights.clamp(min=_LEAST).log()
    advantage, log_mean = (segment_mean(values, response_mask, offsets) for values in (advantages, logs))
    losses = spread(-advantage * log_mean.exp(), response_mask, offsets)
    too_low = falls & (difference < -clip_ratio_low)
    clipped = too_low | (rises & (difference > clip_ratio_high))
    return losses, {
        "clip_fraction": clipped.to(losses.dtype),
        "clip_fraction_lower": too_low.to(losses.dtype),
        "ppo_kl": -difference.detach(),
    }
