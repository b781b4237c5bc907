"""The Dr. GRPO estimator: GRPO without division by the standard deviation; the baseline is the mean.

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.groups import group_mean
from tandem.algorithms.outcome import at_every_token, total_rewards
from tandem.algorithms.registry import Advantages, register_advantage


@register_advantage("dr_grpo")
def dr_grpo(token_level_rewards: Tensor, response_mask: Tensor, offsets: Tensor, group: Tensor) -> Advantages:
    """Subtract the mean total reward of the prompt's samples from each sequence's total reward.

    Equation (R_i is the sum of the rewards of sequence i; mean is the mean of R over the group of i; a group
    with a single sequence has mean 0):

        A_it = R_i - mean

    The paper's loss is not divided by the length of the response either. To get this loss, set
    `actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm`.

    Args:
        token_level_rewards: (N) fp32, reward of each token, after the KL penalty if there is one.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        group: (B) int64, index of the prompt that each sequence answers.

    Returns:
        The advantages (N). The returns are the same tensor, because no critic is trained.

    When to use: like GRPO, if prompts that are almost always or almost never solved should not weigh more
        than other prompts, and wrong responses should not grow longer.
    Watch: `response_length/mean` should not rise while `reward/mean` stays flat; `advantages/max` is in units
        of the reward, so the right learning rate depends on the scale of the reward.
    Cost: nothing.
    Source: Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2.
    """
    scores = total_rewards(token_level_rewards, response_mask, offsets)
    scores = scores - group_mean(scores, group)
    return at_every_token(scores, token_level_rewards, response_mask, offsets)
