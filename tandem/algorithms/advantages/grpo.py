"""The advantage estimator of group relative policy optimisation (GRPO).

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.groups import group_statistics
from tandem.algorithms.outcome import at_every_token, total_rewards
from tandem.algorithms.registry import Advantages, register_advantage


@register_advantage("grpo", "grpo_vectorized")
def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    offsets: Tensor,
    group: Tensor,
    *,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> Advantages:
    """Normalise each sequence's total reward by the mean and the deviation of the prompt's samples.

    Equation (R_i is the sum of the rewards of sequence i; mean and unbiased std are over the group of i; a
    group with a single sequence has mean 0 and std 1):

        A_it = (R_i - mean) / (std + epsilon)
        A_it = R_i - mean                        (if norm_adv_by_std_in_grpo is false, as in dr_grpo)

    Args:
        token_level_rewards: (N) fp32, reward of each token, after the KL penalty if there is one.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        group: (B) int64, index of the prompt that each sequence answers.
        norm_adv_by_std_in_grpo: whether to divide by the standard deviation.
        epsilon: added to the standard deviation, so that the quotient stays finite.

    Returns:
        The advantages (N). The returns are the same tensor, because no critic is trained.

    When to use: the usual choice if each response gets one reward and each prompt has 4 to 64 samples.
    Watch: `reward/mean` should rise; `actor/entropy` should not collapse; `reward/zero_std_share` is the
        share of prompts whose samples all score the same, and the policy learns nothing from these prompts
        because their advantages are 0.
    Cost: nothing.
    Source: Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2.
    """
    scores = total_rewards(token_level_rewards, response_mask, offsets)
    statistics = group_statistics(scores, group)
    scores = scores - statistics.mean
    if norm_adv_by_std_in_grpo:
        scores = scores / (statistics.std + epsilon)
    return at_every_token(scores, token_level_rewards, response_mask, offsets)
