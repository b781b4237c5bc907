"""Group reward-decoupled normalisation."""

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
    """Each component of the reward normalised within its group, then summed, then whitened over the batch.

    Equation (R_ik component k of sequence i, mean_k and unbiased std_k over its group; 0 and 1 for a group of
    one; w_k its weight; mean and var over the batch's response tokens):

        S_it = sum_k w_k * (R_ik - mean_k) / (std_k + epsilon)
        A_it = (S_it - mean) / sqrt(var + 1e-8)

    Args:
        norm_adv_by_std_in_grpo: whether to divide by the standard deviations.
        epsilon: keeps the quotients finite.
        gdpo_reward_weights: (K); none means 1 for each.

    Returns:
        The advantages (N); returns are the same, for no critic is fitted.

    Raises:
        ConfigError: another number of weights than of components.

    When to use: rewards of several parts of unlike scale (right, well-formed, short), of which one would
        drown the others in a sum.
    Watch: each component's mean in `reward/extra/*`: all should rise, or at least none sink for good.
    Cost: nothing; the reward has to return its components.
    Source: Liu et al. 2026, https://arxiv.org/abs/2601.05242, section 3, eq. 4 to 7, where the last mean and
    variance are over responses, each counted once.
    """
    sequences, components = reward_components.shape
    assert sequences == len(offsets) - 1, (sequences, len(offsets))
    if gdpo_reward_weights and len(gdpo_reward_weights) != components:
        raise ConfigError(
            "one weight for each component of the reward",
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
