"""Generalised advantage estimation."""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.masked import kept_tokens, scatter, whiten
from tandem.algorithms.registry import Advantages, register_advantage
from tandem.algorithms.scan import last_indices, reverse_discounted_cumsum_


@register_advantage("gae")
def gae(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    offsets: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Advantages:
    """GAE over the response tokens of each sequence, then whitened over those of the batch.

    Equation (t+1 is the next response token; tokens between two that the policy did not write are
    stepped over without discount, and the value after the last one is zero):

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t = delta_t + gamma * lam * A_{t+1}
        returns_t = A_t + V_t                      (before whitening)

    Args:
        token_level_rewards: (N).
        values: (N), predicted before each token.
        response_mask: (N) bool.
        offsets: (B+1) int64.
        gamma: discount, in [0, 1].
        lam: in [0, 1]; 0 trusts the critic, 1 the rewards.

    Source: Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 11 to 16.
    """
    assert token_level_rewards.shape == values.shape == response_mask.shape, (
        token_level_rewards.shape,
        values.shape,
        response_mask.shape,
    )
    kept, kept_offsets = kept_tokens(response_mask, offsets)
    kept_values = values.index_select(0, kept)
    sums = kept_values.roll(-1)  # becomes gamma * V_{t+1}, then delta, then A
    sums[last_indices(kept_offsets)] = 0
    sums.mul_(gamma).add_(token_level_rewards.index_select(0, kept)).sub_(kept_values)
    reverse_discounted_cumsum_(sums, kept_offsets, gamma * lam)
    returns = scatter(kept_values.add_(sums), kept, len(values))
    return Advantages(scatter(whiten(sums), kept, len(values)), returns)
