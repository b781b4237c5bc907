"""REINFORCE leave-one-out."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.groups import group_statistics
from tandem.algorithms.outcome import at_every_token, total_rewards
from tandem.algorithms.registry import Advantages, register_advantage


@register_advantage("rloo", "rloo_vectorized")
def rloo(token_level_rewards: Tensor, response_mask: Tensor, offsets: Tensor, group: Tensor) -> Advantages:
    """Each sequence's total reward against the mean of the other samples of the same prompt.

    Equation (R_i the sum of sequence i's rewards, n the size of its group):

        A_it = R_i - sum_{j != i} R_j / (n - 1) = (R_i - mean) * n / (n - 1)

    A sample that is alone has no others and keeps R_i.

    Returns:
        The advantages; returns are the same, for no critic is fitted.

    When to use: when the gradient should be unbiased for small groups, from 2 samples of a prompt on.
    Watch: `reward/mean` rises; `advantages/max` is in units of the reward, and the learning rate goes
        with it.
    Cost: nothing.
    Source: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, section 2.3.
    """
    scores = total_rewards(token_level_rewards, response_mask, offsets)
    statistics = group_statistics(scores, group)
    factor = torch.where(statistics.size > 1, statistics.size / (statistics.size - 1), 1.0)
    return at_every_token((scores - statistics.mean) * factor, token_level_rewards, response_mask, offsets)
