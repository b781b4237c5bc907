"""REINFORCE++ and its form with a group baseline."""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.groups import group_mean
from tandem.algorithms.masked import require_same_shape
from tandem.algorithms.outcome import total_rewards, whitened_at_every_token
from tandem.algorithms.registry import Advantages, register_advantage
from tandem.algorithms.responses import Responses
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
        gamma: discount, in [0, 1].

    Returns:
        The advantages A; returns are G.

    When to use: no critic and one sample of a prompt; rewards within a response count from where they are.
    Watch: `actor/grad_norm` and `reward/mean`: the baseline is the batch's mean alone, so easy and hard
        prompts in one batch make it noisy.
    Cost: nothing.
    Source: Hu et al. 2025, https://arxiv.org/abs/2501.03262, section 3.1.
    """
    require_same_shape(token_level_rewards, response_mask)
    tokens = Responses.of(response_mask, offsets)
    sums = reverse_discounted_cumsum_(tokens.take(token_level_rewards), tokens.offsets, gamma)
    returns = tokens.put(sums)
    return Advantages(tokens.whitened(sums.clone()), returns)


@register_advantage("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor, response_mask: Tensor, offsets: Tensor, group: Tensor
) -> Advantages:
    """Each sequence's total reward less its group's mean, whitened over the batch's response tokens.

    Equation (R_i the sum of sequence i's rewards; a group of one has mean 0):

        G_it = R_i - mean_group
        A_it = (G_it - mean) / sqrt(var + 1e-8)

    Returns:
        The advantages; returns are the same, for no critic is fitted.

    When to use: several samples of a prompt, and one scale for the whole batch instead of GRPO's one per
        prompt, which favours prompts of little spread.
    Watch: `reward/mean` rises; `advantages/max` tells the outliers, in standard deviations of the batch.
    Cost: nothing.
    Source: Hu et al. 2025, https://arxiv.org/abs/2501.03262, section 3.2 (REINFORCE++ with baseline).
    """
    scores = total_rewards(token_level_rewards, response_mask, offsets)
    deviations = scores - group_mean(scores, group)
    return whitened_at_every_token(deviations, token_level_rewards, response_mask, offsets)
