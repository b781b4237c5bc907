"""Group relative policy optimisation, and Dr. GRPO by its switch."""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.groups import group_statistics
from tandem.algorithms.masked import segment_sum, spread
from tandem.algorithms.registry import Advantages, register_advantage


@register_advantage("grpo")
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
        A_it = R_i - mean                        (norm_adv_by_std_in_grpo false: Dr. GRPO)

    Args:
        token_level_rewards: (N).
        response_mask: (N) bool.
        offsets: (B+1) int64.
        group: (B) int64.

    Returns:
        The advantages; returns are the same, for no critic is fitted.

    Source: Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2;
    Liu et al. 2025 (Dr. GRPO), https://arxiv.org/abs/2503.20783, section 3.2.
    """
    assert token_level_rewards.shape == response_mask.shape, (token_level_rewards.shape, response_mask.shape)
    scores = segment_sum(token_level_rewards.double(), offsets)
    statistics = group_statistics(scores, group)
    scores = scores - statistics.mean
    if norm_adv_by_std_in_grpo:
        scores = scores / (statistics.std + epsilon)
    advantages = spread(scores.to(token_level_rewards.dtype), response_mask, offsets)
    return Advantages(advantages, advantages)
