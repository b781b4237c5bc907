"""On-policy optimisation with the optimal reward baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.groups import group_mean, group_sum
from tandem.algorithms.masked import segment_sum
from tandem.algorithms.outcome import at_every_token, total_rewards
from tandem.algorithms.registry import Advantages, register_advantage


@register_advantage("opo")
def opo(token_level_rewards: Tensor, response_mask: Tensor, offsets: Tensor, group: Tensor) -> Advantages:
    """Each sequence's total reward less the mean of its prompt's samples weighted by their length.

    Equation (R_i the sum of sequence i's rewards, T_i its response tokens, sums over its group; a sample
    that is alone keeps R_i):

        A_it = R_i - sum_j T_j * R_j / sum_j T_j

    Returns:
        The advantages; returns are the same, for no critic is fitted.

    When to use: exactly on policy, one update per batch, without KL and entropy terms, where lengths within
        a group differ much.
    Watch: `actor/grad_norm` is steadier than with a plain mean; `actor/ppo_kl` should stay at zero, else the
        run is not on policy.
    Cost: nothing.
    Source: Hao et al. 2025, https://arxiv.org/abs/2505.23585.
    """
    scores = total_rewards(token_level_rewards, response_mask, offsets)
    lengths = segment_sum(response_mask, offsets, dtype=torch.float64)
    scores = scores - group_mean(scores, group)  # first, so that equal rewards give exact zeros
    shift = group_sum(lengths * scores, group) / group_sum(lengths, group).clamp(min=1)
    scores = scores - shift.masked_fill(group.bincount()[group] == 1, 0.0)
    return at_every_token(scores, token_level_rewards, response_mask, offsets)
