"""The ReMax estimator: the reward of a greedy response is the baseline.

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.masked import require_same_shape, spread
from tandem.algorithms.registry import Advantages, register_advantage
from tandem.algorithms.responses import Responses
from tandem.algorithms.scan import reverse_discounted_cumsum_


@register_advantage("remax")
def remax(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, offsets: Tensor
) -> Advantages:
    """Subtract the reward of the prompt's greedy response from the rewards still to come at each token.

    Equation (b is the baseline; the sum is over response tokens):

        G_t = sum_{s >= t} r_s
        A_t = G_t - b

    Args:
        token_level_rewards: (N) fp32, reward of each token, after the KL penalty if there is one.
        reward_baselines: (B) fp32, total reward of the greedy response to the sequence's prompt.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.

    Returns:
        The advantages A (N) and the returns G (N).

    When to use: if you can afford only one sample per prompt; needs neither a critic nor a group.
    Watch: `reward/mean` compared with the reward of the greedy responses: the policy learns from the
        difference.
    Cost: one greedy response per prompt and its reward.
    Source: Li et al. 2024, https://arxiv.org/abs/2310.10505, algorithm 1.
    """
    require_same_shape(token_level_rewards, response_mask)
    assert len(reward_baselines) == len(offsets) - 1, (len(reward_baselines), len(offsets))
    tokens = Responses.of(response_mask, offsets)
    sums = reverse_discounted_cumsum_(tokens.take(token_level_rewards), tokens.offsets, 1.0)
    returns = tokens.put(sums)
    return Advantages(returns - spread(reward_baselines.to(returns), response_mask, offsets), returns)
