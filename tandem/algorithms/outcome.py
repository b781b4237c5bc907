"""Total rewards of sequences, and advantages that are one number per sequence.

Shapes: N tokens of all sequences together, B sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.masked import require_same_shape, segment_sum, spread
from tandem.algorithms.registry import Advantages


def total_rewards(token_level_rewards: Tensor, response_mask: Tensor, offsets: Tensor) -> Tensor:
    """(B) float64: the sum of each sequence's rewards, so that differences of equal totals are zero."""
    require_same_shape(token_level_rewards, response_mask)
    return segment_sum(token_level_rewards, offsets, dtype=torch.float64)


def at_every_token(scores: Tensor, like: Tensor, response_mask: Tensor, offsets: Tensor) -> Advantages:
    """(B) to (N): each sequence's advantage at its response tokens, in the type of `like`. Returns are the
    same, for no critic is fitted."""
    advantages = spread(scores.to(like.dtype), response_mask, offsets)
    return Advantages(advantages, advantages)


def whitened_at_every_token(
    scores: Tensor, like: Tensor, response_mask: Tensor, offsets: Tensor
) -> Advantages:
    """`at_every_token` of (S - mean) / sqrt(unbiased variance + 1e-8), both over the batch's response tokens,
    which each sequence's length tells: nothing of the tokens' size is made but the result.

    Args:
        scores: (B) float64; equal ones become exactly zero.
    """
    lengths = segment_sum(response_mask, offsets, dtype=torch.float64)
    count = lengths.sum()
    deviations = scores - scores[:1]  # first, for the mean of equal numbers may differ from them
    deviations = deviations - (lengths * deviations).sum() / count.clamp(min=1)
    variance = (lengths * deviations.square()).sum() / (count - 1).clamp(min=1)
    return at_every_token(deviations * torch.rsqrt(variance + 1e-8), like, response_mask, offsets)
