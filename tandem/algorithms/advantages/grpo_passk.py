"""The GRPO estimator for pass@k, in which only the best sample of each prompt gets an advantage.

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

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
    """Give the best sample of each prompt its lead over the second best, and all other samples 0.

    Equation (R_i is the sum of the rewards of sequence i; R_(1) >= R_(2) are the two largest in the group;
    std is unbiased):

        A_it = (R_(1) - R_(2)) / (std + epsilon)   for the best sample, else 0
        A_it = R_(1) - R_(2)                       (if norm_adv_by_std_in_grpo is false)

    If two samples share the best reward, the lead is 0. If a prompt has a single sample, its advantage is
    R_i.

    Args:
        token_level_rewards: (N) fp32, reward of each token, after the KL penalty if there is one.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        group: (B) int64, index of the prompt that each sequence answers.
        norm_adv_by_std_in_grpo: whether to divide by the standard deviation.
        epsilon: added to the standard deviation, so that the quotient stays finite.

    Returns:
        The advantages (N). The returns are the same tensor, because no critic is trained.

    When to use: if one correct response among k is enough (search with a verifier), with groups of k samples.
    Watch: pass@k on held-out problems (`tandem eval`), which tells more here than `val/accuracy`;
        `actor/grad_norm` is small and noisy, because most samples have advantage 0.
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
