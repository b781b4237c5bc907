"""On-policy optimisation with the optimal reward baseline (OPO).

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.groups import group_mean, group_sum
from tandem.algorithms.masked import segment_sum
from tandem.algorithms.outcome import at_every_token, total_rewards
from tandem.algorithms.registry import Advantages, register_advantage


@register_advantage("opo")
def opo(token_level_rewards: Tensor, response_mask: Tensor, offsets: Tensor, group: Tensor) -> Advantages:
    """Subtract the length-weighted mean reward of the prompt's samples from each total reward.

    Equation (R_i is the sum of the rewards of sequence i; T_i is the number of its response tokens; sums are
    over the group of i; if a prompt has a single sample, its advantage is R_i):

        A_it = R_i - sum_j T_j * R_j / sum_j T_j

    Args:
        token_level_rewards: (N) fp32, reward of each token, after the KL penalty if there is one.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        group: (B) int64, index of the prompt that each sequence answers.

    Returns:
        The advantages (N). The returns are the same tensor, because no critic is trained.

    When to use: exactly on-policy training (one update per batch) without KL and entropy terms, if response
        lengths within a group differ much.
    Watch: `actor/grad_norm` is steadier than with a plain mean; `actor/ppo_kl` should stay at 0, otherwise
        the run is not on-policy.
    Cost: nothing.
    Source: Hao et al. 2025, https://arxiv.org/abs/2505.23585.
    """
    scores = total_rewards(token_level_rewards, response_mask, offsets)
    lengths = segment_sum(response_mask, offsets, dtype=torch.float64)
    scores = scores - group_mean(scores, group)  # subtracted first, so that equal rewards give exactly 0
    shift = group_sum(lengths * scores, group) / group_sum(lengths, group).clamp(min=1)
    scores = scores - shift.masked_fill(group.bincount()[group] == 1, 0.0)
    return at_every_token(scores, token_level_rewards, response_mask, offsets)
