"""GRPO for pass@k: only the best sample of a prompt is rewarded."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.groups import best_two, group_statistics
from tandem.algorithms.outcome import at_every_token, total_rewards
from tandem.algorithms.registry import Advantages, register_advantage


@register_advantage("grpo_passk")
def grpo_passk(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    offsets: Tensor,
    group: Tensor,
    *,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> Advantages:
    """The best sample's lead over the second best of the same prompt; zero for all others.

    Equation (R_i the sum of sequence i's rewards, R_(1) >= R_(2) the greatest of its group, unbiased std):

        A_it = (R_(1) - R_(2)) / (std + epsilon)   for the best sample, else 0
        A_it = R_(1) - R_(2)                       (norm_adv_by_std_in_grpo false)

    Where two are best, the lead is zero. A sample that is alone keeps R_i.

    Args:
        norm_adv_by_std_in_grpo: whether to divide by the standard deviation.
        epsilon: keeps the quotient finite.

    Returns:
        The advantages; returns are the same, for no critic is fitted.

    When to use: when one right answer among k counts (search with a verifier), with groups of k samples.
    Watch: pass@k on held-out problems (`tandem eval`) rather than `val/accuracy`; most samples teach
        nothing, so `actor/grad_norm` is small and noisy.
    Cost: nothing.
    Source: Tang et al. 2025, https://arxiv.org/abs/2503.19595, section 3.1 (the leave-one-out form of
    pass@k), which does not divide by std.
    """
    scores = total_rewards(token_level_rewards, response_mask, offsets)
    statistics = group_statistics(scores, group)
    best, second = best_two(scores, group)
    lead = torch.zeros_like(scores)
    lead[best] = scores[best] - second
    if norm_adv_by_std_in_grpo:
        lead = lead / (statistics.std + epsilon)
    return at_every_token(lead, token_level_rewards, response_mask, offsets)
