"""The advantage estimator of group policy gradient (GPG).

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

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
    """Subtract the group's mean reward and scale up to make up for groups without a learning signal.

    Equation (R_i is the sum of the rewards of sequence i; mean is over the group of i, and 0 for a group with
    a single sequence; B is the number of sequences; M of them are in groups in which every deviation from the
    mean is 0):

        A_it = B / (B - M) * (R_i - mean) / f_norm

    Args:
        token_level_rewards: (N) fp32, reward of each token, after the KL penalty if there is one.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        group: (B) int64, index of the prompt that each sequence answers.
        f_norm: divisor of the deviations; the paper's F_norm, if F_norm is a constant.

    Returns:
        The advantages (N). The returns are the same tensor, because no critic is trained.

    When to use: the plain policy gradient without ratios, clipping or KL, together with the loss `gpg`.
    Watch: `actor/grad_norm` should not fall as more prompts are always or never solved; there is no clipping,
        so this metric is the first to show update steps that are too large.
    Cost: nothing.
    Source: Chu et al. 2025, https://arxiv.org/abs/2504.02546, section 2, the advantage times alpha.
    """
    scores = total_rewards(token_level_rewards, response_mask, offsets)
    deviations = scores - group_mean(scores, group)
    teaching = group_sum(deviations.abs(), group) > 0
    alpha = len(scores) / teaching.sum().clamp(min=1)
    return at_every_token(alpha * deviations / f_norm, token_level_rewards, response_mask, offsets)
