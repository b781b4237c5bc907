"""Maximum likelihood reinforcement learning (MaxRL).

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

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
    """Divide each sequence's deviation from its group's success rate by that success rate.

    Equation (R_i is the sum of the rewards of sequence i, 0 for failure and 1 for success; mean is over the
    group of i):

        A_it = (R_i - mean) / (mean + epsilon)

    A group without a success has advantages of 0. If a prompt has a single sample, its advantage is R_i.

    Args:
        token_level_rewards: (N) fp32, reward of each token; no sequence's total may be negative.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        group: (B) int64, index of the prompt that each sequence answers.
        epsilon: added to the success rate, so that the quotient stays finite.

    Returns:
        The advantages (N). The returns are the same tensor, because no critic is trained.

    Raises:
        RewardError: the total reward of a sequence is negative.

    When to use: rewards of 0 and 1 with many samples per prompt, if hard prompts matter: with n samples,
        MaxRL maximises the first n - 1 terms of the likelihood log p = -sum_k (1 - p)**k / k, and dr_grpo
        only the first.
    Watch: `advantages/max` reaches n - 1 if one of n samples is correct; also pass@k on held-out problems.
    Cost: nothing.
    Source: Tajwar et al. 2026, https://arxiv.org/abs/2602.02710, the estimator with the baseline.
    """
    scores = total_rewards(token_level_rewards, response_mask, offsets)
    if bool((scores < 0).any()):
        raise RewardError(
            "maxrl uses the mean reward of a prompt's samples as a success rate, so rewards must be >= 0",
            field="token_level_rewards",
            got=f"a total of {scores.min().item():g} for sample {int(scores.argmin())}",
            expected="rewards from 0 (failure) to 1 (success)",
            remedy="shift the reward so that a failure scores 0",
        )
    statistics = group_statistics(scores, group)
    rate = torch.where(statistics.size > 1, statistics.mean + epsilon, 1.0)
    return at_every_token((scores - statistics.mean) / rate, token_level_rewards, response_mask, offsets)
