"""Group reward-decoupled normalisation policy optimisation (GDPO).

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.groups import group_statistics
from tandem.algorithms.outcome import whitened_at_every_token
from tandem.algorithms.registry import Advantages, register_advantage
from tandem.errors import ConfigError


@register_advantage("gdpo")
def gdpo(
    reward_components: Tensor,
    response_mask: Tensor,
    offsets: Tensor,
    group: Tensor,
    *,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
    gdpo_reward_weights: tuple[float, ...] = (),
) -> Advantages:
    """Normalise each reward component within its group, sum the components and whiten over the batch.

    Equation (R_ik is reward component k of sequence i; mean_k and the unbiased std_k are over the group of i,
    and are 0 and 1 for a group with a single sequence; w_k is the weight of component k; mean and var are
    over the batch's response tokens):

        S_it = sum_k w_k * (R_ik - mean_k) / (std_k + epsilon)
        A_it = (S_it - mean) / sqrt(var + 1e-8)

    Args:
        reward_components: (B, K) fp32, the rewards of each sequence by component.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        group: (B) int64, index of the prompt that each sequence answers.
        norm_adv_by_std_in_grpo: whether to divide by the standard deviations.
        epsilon: added to each standard deviation, so that the quotients stay finite.
        gdpo_reward_weights: (K), weight of each component; empty means that every weight is 1.

    Returns:
        The advantages (N). The returns are the same tensor, because no critic is trained.

    Raises:
        ConfigError: the number of weights differs from the number of components.

    When to use: a reward with several components on different scales (correct, well-formed, short), where one
        component would dominate a plain sum.
    Watch: the mean of each component in `reward/extra/*`: all should rise, or at least none should fall for
        good.
    Cost: nothing; the reward function must return the components.
    Source: Liu et al. 2026, https://arxiv.org/abs/2601.05242, section 3, eq. 4 to 7, where the last mean and
        variance are over responses, each counted once.
    """
    sequences, components = reward_components.shape
    assert sequences == len(offsets) - 1, (sequences, len(offsets))
    if gdpo_reward_weights and len(gdpo_reward_weights) != components:
        raise ConfigError(
            "the number of weights must equal the number of reward components",
            field="gdpo_reward_weights",
            got=list(gdpo_reward_weights),
            expected=f"{components} numbers",
        )
    weights = gdpo_reward_weights or (1.0,) * components
    total = torch.zeros(sequences, dtype=torch.float64, device=reward_components.device)
    for weight, scores in zip(weights, reward_components.double().unbind(1), strict=True):
        statistics = group_statistics(scores.contiguous(), group)
        scale = statistics.std + epsilon if norm_adv_by_std_in_grpo else 1.0
        total += weight * (scores - statistics.mean) / scale
    return whitened_at_every_token(total, reward_components, response_mask, offsets)
