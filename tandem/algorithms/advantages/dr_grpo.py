"""Dr. GRPO: the group's mean as the baseline, and no division by a deviation."""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.groups import group_mean
from tandem.algorithms.outcome import at_every_token, total_rewards
from tandem.algorithms.registry import Advantages, register_advantage


@register_advantage("dr_grpo")
def dr_grpo(token_level_rewards: Tensor, response_mask: Tensor, offsets: Tensor, group: Tensor) -> Advantages:
    """Each sequence's total reward less the mean of the samples of the same prompt.

    Equation (R_i the sum of sequence i's rewards, the mean over its group; a group of one has mean 0):

        A_it = R_i - mean

    The paper's loss is not divided by the response's length either: set
    `actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm`.

    Returns:
        The advantages; returns are the same, for no critic is fitted.

    When to use: as GRPO, where prompts that are almost always or almost never solved should weigh no more
        than others, and wrong answers should not grow long.
    Watch: `response_length/mean` should not rise while `reward/mean` stands still; `advantages/max` is in
        units of the reward, and the learning rate goes with it.
    Cost: nothing.
    Source: Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2.
    """
    scores = total_rewards(token_level_rewards, response_mask, offsets)
    scores = scores - group_mean(scores, group)
    return at_every_token(scores, token_level_rewards, response_mask, offsets)
