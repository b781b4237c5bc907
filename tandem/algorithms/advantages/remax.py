"""ReMax: the greedy response as the baseline."""

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
    """The rewards still to come at each token less the total reward of the prompt's greedy response.

    Equation (b the baseline, the sum over response tokens):

        G_t = sum_{s >= t} r_s
        A_t = G_t - b

    Returns:
        The advantages A; returns are G.

    When to use: when one sample of a prompt is all that can be afforded: no critic, no group.
    Watch: `reward/mean` against the greedy response's: their difference is what is learnt from.
    Cost: one greedy response per prompt and its reward.
    Source: Li et al. 2024, https://arxiv.org/abs/2310.10505, algorithm 1.
    """
    require_same_shape(token_level_rewards, response_mask)
    assert len(reward_baselines) == len(offsets) - 1, (len(reward_baselines), len(offsets))
    tokens = Responses.of(response_mask, offsets)
    sums = reverse_discounted_cumsum_(tokens.take(token_level_rewards), tokens.offsets, 1.0)
    returns = tokens.put(sums)
    return Advantages(returns - spread(reward_baselines.to(returns), response_mask, offsets), returns)
