"""Maximum likelihood reinforcement learning."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.groups import group_statistics
from tandem.algorithms.outcome import at_every_token, total_rewards
from tandem.algorithms.registry import Advantages, register_advantage
from tandem.errors import RewardError


@register_advantage("maxrl")
def maxrl(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    offsets: Tensor,
    group: Tensor,
    *,
    epsilon: float = 1e-6,
) -> Advantages:
    """Each sequence's deviation from its group's rate of success, over that rate.

    Equation (R_i the sum of sequence i's rewards, 0 for failure and 1 for success, mean over its group):

        A_it = (R_i - mean) / (mean + epsilon)

    A group without success teaches nothing, its advantages are zero; a sample that is alone keeps R_i.

    Args:
        token_level_rewards: no sequence's total negative.
        epsilon: keeps the quotient finite.

    Returns:
        The advantages; returns are the same, for no critic is fitted.

    Raises:
        RewardError: a negative total.

    When to use: rewards of 0 and 1 and many samples of a prompt, where hard prompts matter: with n samples
        it climbs the first n - 1 terms of the likelihood log p = -sum_k (1 - p)**k / k, dr_grpo only one.
    Watch: `advantages/max` reaches n - 1 where one of n is right; pass@k on held-out problems.
    Cost: nothing.
    Source: Tajwar et al. 2026, https://arxiv.org/abs/2602.02710, the estimator with the baseline.
    """
    scores = total_rewards(token_level_rewards, response_mask, offsets)
    if bool((scores < 0).any()):
        raise RewardError(
            "maxrl reads the mean reward of a prompt's samples as their rate of success, and one is negative",
            field="token_level_rewards",
            got=f"{scores.min().item():g} in total for sample {int(scores.argmin())}",
            expected="rewards from 0 for failure to 1 for success",
            remedy="shift the reward, so that failure is 0",
        )
    statistics = group_statistics(scores, group)
    rate = torch.where(statistics.size > 1, statistics.mean + epsilon, 1.0)
    return at_every_token((scores - statistics.mean) / rate, token_level_rewards, response_mask, offsets)
