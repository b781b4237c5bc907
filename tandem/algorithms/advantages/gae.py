"""Generalised advantage estimation (GAE).

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

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
    """Compute GAE advantages for the response tokens and whiten them over the batch.

    Equation (t+1 is the next response token of the sequence; tokens in between that the policy did not write
    are skipped without discount; the value after the last response token is 0):

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t = delta_t + gamma * lam * A_{t+1}
        returns_t = A_t + V_t                      (before whitening)

    Args:
        token_level_rewards: (N) fp32, reward of each token, after the KL penalty if there is one.
        values: (N) fp32, the critic's value before each token.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        gamma: discount, in [0, 1].
        lam: in [0, 1]; 0 relies on the critic's values only, 1 on the rewards only.

    Returns:
        The advantages A (N), whitened over the batch's response tokens, and the returns (N) of the equation.

    When to use: PPO with a critic, if rewards arrive within a response, or if responses are long and each
        token should get its own credit.
    Watch: `critic/explained_variance` should rise from 0 towards 1; if it is below 0, the critic misleads the
        policy, and lam should be nearer to 1.
    Cost: a critic: a second model with its own forward pass and update.
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
