"""Generalised advantage estimation."""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.masked import require_same_shape
from tandem.algorithms.registry import Advantages, register_advantage
from tandem.algorithms.responses import Responses
from tandem.algorithms.scan import following, reverse_discounted_cumsum_


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
        gamma: discount, in [0, 1].
        lam: in [0, 1]; 0 trusts the critic, 1 the rewards.

    Returns:
        The advantages A, whitened over the batch's response tokens; returns as above.

    When to use: PPO with a critic, for rewards within a response or long ones whose credit should be told
        apart token by token.
    Watch: `critic/explained_variance` should rise from 0 towards 1; below 0 the critic misleads and lam
        should be nearer to 1.
    Cost: a critic: a second model, its forward and its update.
    Source: Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 11 to 16.
    """
    require_same_shape(token_level_rewards, values, response_mask)
    tokens = Responses.of(response_mask, offsets)
    kept_values = tokens.take(values)
    sums = following(kept_values, tokens.offsets).mul_(gamma).sub_(kept_values)
    tokens.add_(sums, token_level_rewards)  # delta
    reverse_discounted_cumsum_(sums, tokens.offsets, gamma * lam)
    returns = tokens.put(kept_values.add_(sums))
    return Advantages(tokens.whitened(sums), returns)
