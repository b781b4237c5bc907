"""Group sequence policy optimisation (GSPO).

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.masked import require_same_shape, segment_mean, spread
from tandem.algorithms.registry import register_policy_loss
from tandem.algorithms.surrogate import clipped_surrogate

_MOST = 10.0
"""The bound of a sequence's mean log-ratio, in nats. A larger ratio is not a meaningful estimate."""


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
    """Return PPO's clipped loss with one ratio per sequence, the geometric mean of its tokens' ratios.

    Equation (T_i is the number of response tokens in sequence i; sg stops the gradient):

        s_i = exp(1 / T_i * sum_t (log_probs_it - old_log_probs_it))
        s_it = min(sg(s_i) * exp(log_probs_it - sg(log_probs_it)), e^10)
        l_it = max(-s_it * A_it, -clip(s_it, 1 - low, 1 + high) * A_it)

    This is the paper's token form, GSPO-token. If all tokens of a sequence have the same advantage, its
    values and its gradient equal those of the sequence form. In addition, tokens may have different
    advantages. A sequence whose mean log-ratio is above 10 nats has no gradient, because for a negative
    advantage nothing else would bound its loss.

    When to use: models with noisy token ratios, above all mixtures of experts, whose routing changes between
        updates; one reward per sequence. A sequence's ratio moves less than its tokens' ratios, so use narrow
        bounds: the paper uses clip_ratio_low=0.0003 and clip_ratio_high=0.0004. Usual aggregation:
        seq-mean-token-mean.
    Watch: `actor/clip_fraction` is the share of tokens in clipped sequences, often far more than with PPO;
        `actor/ppo_kl` is how far the policy has moved since the samples were written, nats per token.
    Cost: nothing.

    Args:
        log_probs: (N) fp32, nats, of the policy being trained; carries the gradient.
        old_log_probs: (N) fp32, nats, of the policy before this batch's updates.
        advantages: (N) fp32.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        clip_ratio_low: how far the sequence's ratio may fall below 1.
        clip_ratio_high: how far the sequence's ratio may rise above 1.

    Returns:
        (N) losses, and the per-token metrics clip_fraction and ppo_kl (old_log_probs - log_probs).

    Source: Zheng et al. 2025, https://arxiv.org/abs/2507.18071, sections 4.1 and 4.3 (GSPO-token); its clips,
        section 5.1.
    """
    require_same_shape(log_probs, old_log_probs, advantages, response_mask)
    difference = torch.where(response_mask, log_probs - old_log_probs, 0).detach()
    sequence = spread(segment_mean(difference, response_mask, offsets), response_mask, offsets)
    ratio = (log_probs - log_probs.detach() + sequence).clamp(max=_MOST).exp()
    losses, clipped = clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high)
    return losses, {"clip_fraction": clipped.to(ratio.dtype), "ppo_kl": -difference}
