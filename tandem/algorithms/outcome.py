"""Total rewards of sequences, and advantages with one number per sequence.

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.masked import require_same_shape, segment_sum, spread
from tandem.algorithms.registry import Advantages


def total_rewards(token_level_rewards: Tensor, response_mask: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of each sequence's rewards, (B) float64.

    In float64, the difference of two equal totals is exactly 0.
    """
    require_same_shape(token_level_rewards, response_mask)
    return segment_sum(token_level_rewards, offsets, dtype=torch.float64)


def at_every_token(scores: Tensor, like: Tensor, response_mask: Tensor, offsets: Tensor) -> Advantages:
    """Repeat each sequence's advantage at its response tokens, (B) to (N), in the dtype of `like`.

    The returns are the same tensor, because no critic is trained.
    """
    advantages = spread(scores.to(like.dtype), response_mask, offsets)
    return Advantages(advantages, advantages)


def whitened_at_every_token(
    scores: Tensor, like: Tensor, response_mask: Tensor, offsets: Tensor
) -> Advantages:
    """Whiten the scores over the batch's response tokens and repeat them at these tokens.

    The result is `at_every_token` of (S - mean) / sqrt(unbiased variance + 1e-8). Mean and variance are over
    response tokens, and are computed from the length of each sequence. So the result is the only new tensor
    of size N.

    Args:
        scores: (B) float64; equal scores become exactly 0.
        like: a tensor with the dtype of the result.
        response_mask: (N) bool, true at response tokens.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
    """
    lengths = segment_sum(response_mask, offsets, dtype=torch.float64)
    count = lengths.sum()
    deviations = scores - scores[:1]  # because the rounded mean of equal numbers may differ from them
    deviations = deviations - (lengths * deviations).sum() / count.clamp(min=1)
    variance = (lengths * deviations.square()).sum() / (count - 1).clamp(min=1)
    return at_every_token(deviations * torch.rsqrt(variance + 1e-8), like, response_mask, offsets)
