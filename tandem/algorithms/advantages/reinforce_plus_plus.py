"""REINFORCE++, and its variant with a group baseline.

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

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
    """Compute the discounted return of each token and whiten it over the batch's response tokens.

    Equation (t+1 is the next response token of the sequence; tokens in between that the policy did not write
    are skipped without discount; mean and var are over the batch's response tokens):

        G_t = r_t + gamma * G_{t+1}
        A_t = (G_t - mean) / sqrt(var + 1e-8)

    Args:
        token_level_rewards: (N) fp32, reward of each token, after the KL penalty if there is one.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        gamma: discount, in [0, 1].

    Returns:
        The advantages A (N) and the returns G (N).

    When to use: no critic and one sample per prompt; a reward within a response counts for the tokens up to
        it.
    Watch: `actor/grad_norm` and `reward/mean`: the baseline is only the mean of the batch, so a batch that
        mixes easy and hard prompts makes the gradient noisy.
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
    """Subtract the group's mean reward and whiten over the batch's response tokens.

    Equation (R_i is the sum of the rewards of sequence i; mean_group is over the group of i, and 0 for a
    group with a single sequence; mean and var are over the batch's response tokens):

        G_it = R_i - mean_group
        A_it = (G_it - mean) / sqrt(var + 1e-8)

    Args:
        token_level_rewards: (N) fp32, reward of each token, after the KL penalty if there is one.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        group: (B) int64, index of the prompt that each sequence answers.

    Returns:
        The advantages (N). The returns are the same tensor, because no critic is trained.

    When to use: several samples per prompt, if the whole batch should share one scale. GRPO has one scale per
        prompt, which favours prompts whose rewards vary little.
    Watch: `reward/mean` should rise; `advantages/max` shows outliers, in standard deviations of the batch.
    Cost: nothing.
    Source: Hu et al. 2025, https://arxiv.org/abs/2501.03262, section 3.2 (REINFORCE++ with baseline).
    """
    scores = total_rewards(token_level_rewards, response_mask, offsets)
    deviations = scores - group_mean(scores, group)
    return whitened_at_every_token(deviations, token_level_rewards, response_mask, offsets)
