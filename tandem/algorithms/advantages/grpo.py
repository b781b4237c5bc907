"""Group relative policy optimisation."""

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
    """Each sequence's total reward against the samples of the same prompt.

    Equation (R_i the sum of sequence i's rewards, mean and unbiased std over its group; a group of
    one has mean 0 and std 1):

        A_it = (R_i - mean) / (std + epsilon)
        A_it = R_i - mean                        (norm_adv_by_std_in_grpo false: as dr_grpo)

    Args:
        norm_adv_by_std_in_grpo: whether to divide by the standard deviation.
        epsilon: keeps the quotient finite.

    Returns:
        The advantages; returns are the same, for no critic is fitted.

    When to use: the usual choice for rewards of whole responses, with 4 to 64 samples of a prompt.
    Watch: `reward/mean` rises; `actor/entropy` should not collapse; where all samples of a prompt score the
        same (`reward/zero_std_share` of the prompts), their advantages are zero and teach nothing.
    Cost: nothing.
    Source: Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2.
    """
    scores = total_rewards(token_level_rewards, response_mask, offsets)
    statistics = group_statistics(scores, group)
    scores = scores - statistics.mean
    if norm_adv_by_std_in_grpo:
        scores = scores / (statistics.std + epsilon)
    return at_every_token(scores, token_level_rewards, response_mask, offsets)
