"""Geometric-mean policy optimisation."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.masked import require_same_shape, segment_mean, spread
from tandem.algorithms.registry import register_policy_loss
from tandem.algorithms.surrogate import log_ratio

_LEAST = 1e-10
"""Importance weight of a token that is masked, so that it alone does not silence its sequence."""


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
    """GMPO: the geometric mean of each sequence's clipped ratios, where GRPO has the arithmetic one.

    Equation (d_it = log_probs - old_log_probs, clamped to [-20, 20]; w_it the rollout_is_weights, at least
    1e-10; T_i response tokens in sequence i; A_i the mean of its advantages):

        c_it = min(d_it, high)  where A_it > 0,  max(d_it, -low)  where A_it < 0,  0  else
        l_it = l_i = -A_i * exp(1 / T_i * sum_t (c_it + log w_it))

    Every token of a sequence holds the sequence's loss, so that the mean over them is that loss. A sequence's
    importance weight is the geometric mean of its tokens', as its ratio is; a token that the correction masks
    (w = 0) takes 23 / T_i nats off it. Beyond 20 nats a token has no gradient, so that a loss with a
    negative advantage stays finite; verl has no such bound.

    When to use: when single tokens with extreme ratios make GRPO's updates unstable; advantages must be those
    of whole sequences. The bounds are in nats: the paper sets both to 0.4. Usual aggregation:
    seq-mean-token-mean, the paper's; any other weighs the sequences' losses by their lengths.
    Watch: `actor/clip_fraction` tokens held at a bound; `actor/clip_fraction_lower` those of them with a
    negative advantage; `actor/ppo_kl` how far the policy has moved since the samples were written.
    Cost: nothing.

    Args:
        advantages: one number per sequence.
        clip_ratio_low, clip_ratio_high: how far a token's log-ratio may fall below and rise above zero, nats.

    Returns:
        (N) losses, and per token: clip_fraction and clip_fraction_lower (1 where a bound binds, for either
        sign of the advantage and for the negative one), ppo_kl (-d).

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
