"""REINFORCE leave-one-out."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.groups import group_statistics
from tandem.algorithms.masked import segment_sum, spread
from tandem.algorithms.registry import Advantages, register_advantage


@register_advantage("rloo")
def rloo(token_level_rewards: Tensor, response_mask: Tensor, offsets: Tensor, group: Tensor) -> Advantages:
    """Each sequence's total reward against the mean of the other samples of the same prompt.

    Equation (R_i the sum of sequence i's rewards, n the size of its group):

        A_it = R_i - sum_{j != i} R_j / (n - 1) = (R_i - mean) * n / (n - 1)

    A sample that is alone has no others and keeps R_i.

    Args:
        token_level_rewards: (N).
        response_mask: (N) bool.
        offsets: (B+1) int64.
        group: (B) int64.

    Returns:
        The advantages; returns are the same, for no critic is fitted.

    Source: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, eq. 8.
    """
    assert token_level_rewards.shape == response_mask.shape, (token_level_rewards.shape, response_mask.shape)
    scores = segment_sum(token_level_rewards.double(), offsets)
    statistics = group_statistics(scores, group)
    factor = torch.where(statistics.size > 1, statistics.size / (statistics.size - 1), 1.0)
    scores = (scores - statistics.mean) * factor
    advantages = spread(scores.to(token_level_rewards.dtype), response_mask, offsets)
    return Advantages(advantages, advantages)
