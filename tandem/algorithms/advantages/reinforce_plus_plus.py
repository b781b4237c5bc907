"""REINFORCE++ and its form with a group baseline."""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.groups import group_statistics
from tandem.algorithms.masked import kept_tokens, masked_whiten, scatter, segment_sum, spread, whiten
from tandem.algorithms.registry import Advantages, register_advantage
from tandem.algorithms.scan import reverse_discounted_cumsum_


@register_advantage("reinforce_plus_plus")
def reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, offsets: Tensor, *, gamma: float = 1.0
) -> Advantages:
    """The discounted return of each token, whitened over the response tokens of the batch.

    Equation (t+1 is the next response token; tokens between two that the policy did not write are
    stepped over without discount):

        G_t = r_t + gamma * G_{t+1}
        A_t = (G_t - mean) / sqrt(var + 1e-8)

    Args:
        token_level_rewards: (N).
        response_mask: (N) bool.
        offsets: (B+1) int64.
        gamma: discount, in [0, 1].

    Returns:
        The advantages A; returns are G.

    Source: Hu et al. 2025, https://arxiv.org/abs/2501.03262, section 3.
    """
    assert token_level_rewards.shape == response_mask.shape, (token_level_rewards.shape, response_mask.shape)
    kept, kept_offsets = kept_tokens(response_mask, offsets)
    sums = token_level_rewards.index_select(0, kept)
    reverse_discounted_cumsum_(sums, kept_offsets, gamma)
    total = len(response_mask)
    return Advantages(scatter(whiten(sums), kept, total), scatter(sums, kept, total))


@register_advantage("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor, response_mask: Tensor, offsets: Tensor, group: Tensor
) -> Advantages:
    """Each sequence's total reward less its group's mean, whitened over the batch's response tokens.

    Equation (R_i the sum of sequence i's rewards; a group of one has mean 0):

        G_it = R_i - mean_group
        A_it = (G_it - mean) / sqrt(var + 1e-8)

    Args:
        token_level_rewards: (N).
        response_mask: (N) bool.
        offsets: (B+1) int64.
        group: (B) int64.

    Returns:
        The advantages; returns are the same, for no critic is fitted.

    Source: Hu et al. 2025, https://arxiv.org/abs/2501.03262, section 3 (REINFORCE++ with baseline).
    """
    assert token_level_rewards.shape == response_mask.shape, (token_level_rewards.shape, response_mask.shape)
    scores = segment_sum(token_level_rewards.double(), offsets)
    scores = scores - group_statistics(scores, group).mean
    per_token = spread(scores.to(token_level_rewards.dtype), response_mask, offsets)
    advantages = masked_whiten(per_token, response_mask)
    return Advantages(advantages, advantages)
