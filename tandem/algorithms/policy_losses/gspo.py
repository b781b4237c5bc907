"""Group sequence policy optimisation."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.masked import require_same_shape, segment_mean, spread
from tandem.algorithms.registry import register_policy_loss
from tandem.algorithms.surrogate import clipped_surrogate

_MOST = 10.0
"""Nats. Where the mean log-ratio of a sequence is larger, its ratio is no estimate of anything."""


@register_policy_loss("gspo")
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    offsets: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate with one ratio for a whole sequence, the geometric mean of its tokens' ratios.

    Equation (T_i response tokens in sequence i, sg stops the gradient):

        s_i = exp(1 / T_i * sum_t (log_probs_it - old_log_probs_it))
        s_it = min(sg(s_i) * exp(log_probs_it - sg(log_probs_it)), e^10)
        l_it = max(-s_it * A_it, -clip(s_it, 1 - low, 1 + high) * A_it)

    This is the paper's token form, GSPO-token: where all tokens of a sequence have one advantage, its values
    and its gradient are those of the sequence form, and tokens may have advantages of their own. A sequence
    whose mean log-ratio is above 10 nats has no gradient. Nothing else would bound it where the advantage is
    negative.

    When to use: models whose tokens' ratios are noisy, above all mixtures of experts, whose routing changes
    between updates; sequences with one reward each. A sequence's ratio moves less than its tokens': the
    paper clips at clip_ratio_low=0.0003 and clip_ratio_high=0.0004. Usual aggregation: seq-mean-token-mean.
    Watch: `actor/clip_fraction` the share of tokens in sequences that are clipped, often far more than under
    PPO; `actor/ppo_kl` how far the policy has moved since the samples were written, nats per token.
    Cost: nothing.

    Args:
        clip_ratio_low, clip_ratio_high: how far the sequence's ratio may fall below and rise above one.

    Returns:
        (N) losses, and per token: clip_fraction, ppo_kl (old_log_probs - log_probs).

    Source: Zheng et al. 2025, https://arxiv.org/abs/2507.18071, sections 4.1 and 4.3 (GSPO-token); its
    clips, section 5.1.
    """
    require_same_shape(log_probs, old_log_probs, advantages, response_mask)
    difference = torch.where(response_mask, log_probs - old_log_probs, 0).detach()
    sequence = spread(segment_mean(difference, response_mask, offsets), response_mask, offsets)
    ratio = (log_probs - log_probs.detach() + sequence).clamp(max=_MOST).exp()
    losses, clipped = clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high)
    return losses, {"clip_fraction": clipped.to(ratio.dtype), "ppo_kl": -difference}
