"""Group policy gradient."""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.groups import group_mean, group_sum
from tandem.algorithms.outcome import at_every_token, total_rewards
from tandem.algorithms.registry import Advantages, register_advantage


@register_advantage("gpg")
def gpg(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    offsets: Tensor,
    group: Tensor,
    *,
    f_norm: float = 1.0,
) -> Advantages:
    """Each sequence's total reward less its group's mean, scaled up for the groups that teach nothing.

    Equation (R_i the sum of sequence i's rewards, mean over its group, 0 for a group of one; B sequences,
    M of them in groups whose every deviation from the mean is zero):

        A_it = B / (B - M) * (R_i - mean) / f_norm

    Args:
        f_norm: divisor of the deviations, the paper's F_norm where that is a constant.

    Returns:
        The advantages; returns are the same, for no critic is fitted.

    When to use: the plain policy gradient without ratios, clipping and KL, together with the loss `gpg`.
    Watch: `actor/grad_norm` does not sink as more prompts are always or never solved; without clipping it
        warns first of steps that are too large.
    Cost: nothing.
    Source: Chu et al. 2025, https://arxiv.org/abs/2504.02546, section 2, the advantage times alpha.
    """
    scores = total_rewards(token_level_rewards, response_mask, offsets)
    deviations = scores - group_mean(scores, group)
    teaching = group_sum(deviations.abs(), group) > 0
    alpha = len(scores) / teaching.sum().clamp(min=1)
    return at_every_token(alpha * deviations / f_norm, token_level_rewards, response_mask, offsets)
