"""REINFORCE leave-one-out (RLOO).

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.groups import group_statistics
from tandem.algorithms.outcome import at_every_token, total_rewards
from tandem.algorithms.registry import Advantages, register_advantage


@register_advantage("rloo", "rloo_vectorized")
def rloo(token_level_rewards: Tensor, response_mask: Tensor, offsets: Tensor, group: Tensor) -> Advantages:
    """Subtract the mean total reward of the prompt's other samples from each total reward.

    Equation (R_i is the sum of the rewards of sequence i; n is the size of its group):

        A_it = R_i - sum_{j != i} R_j / (n - 1) = (R_i - mean) * n / (n - 1)

    If a prompt has a single sample, its advantage is R_i.

    Args:
        token_level_rewards: (N) fp32, reward of each token, after the KL penalty if there is one.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        group: (B) int64, index of the prompt that each sequence answers.

    Returns:
        The advantages (N). The returns are the same tensor, because no critic is trained.

    When to use: if the gradient should be unbiased even for small groups, from 2 samples per prompt upwards.
    Watch: `reward/mean` should rise; `advantages/max` is in units of the reward, so the right learning rate
        depends on the scale of the reward.
    Cost: nothing.
    Source: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, section 2.3.
    """
    scores = total_rewards(token_level_rewards, response_mask, offsets)
    statistics = group_statistics(scores, group)
    factor = torch.where(statistics.size > 1, statistics.size / (statistics.size - 1), 1.0)
    return at_every_token((scores - statistics.mean) * factor, token_level_rewards, response_mask, offsets)
