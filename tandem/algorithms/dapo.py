"""Two parts of DAPO besides its loss: the filter of prompts and the penalty on overlong responses.

Shapes: B is the number of sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor


def groups_with_spread(values: Tensor, n: int) -> Tensor:
    """Return, for each prompt, whether its responses have different values, (B / n) bool.

    If all responses to a prompt have the same value, advantages relative to the group are 0, and the policy
    learns nothing from the prompt.

    Equation (R_i are the values of a prompt's responses):

        kept = max_i R_i > min_i R_i

    When to use: dynamic sampling, with estimators that compare the responses to a prompt.
    Watch: `sampling/dropped_groups` is the share of prompts that are dropped; if it is near 1, the dataset is
        too easy or too hard.
    Cost: additional rollouts until a batch is full.
    Source: Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, section 3.2, eq. 11.

    Args:
        values: (B) floats; the n values of each prompt are adjacent.
        n: number of responses per prompt.
    """
    assert values.ndim == 1, values.shape
    assert len(values) % n == 0, (len(values), n)
    groups = values.view(-1, n)
    if not len(groups):
        return torch.zeros(0, dtype=torch.bool)
    return groups.amax(1) > groups.amin(1)


def soft_overlong_punishment(
    response_length: Tensor, *, max_length: int, buffer: int, penalty_factor: float = 1.0
) -> Tensor:
    """Return the reward penalty for the length of each response, (B) float64, never above 0.

    Equation 13:
        0                                    |y| <= L - C
        f * ((L - C) - |y|) / C              L - C < |y|

    |y| is the length of the response, L the maximum length, C the buffer and f the factor. The largest
    penalty is -f, at |y| = L, because no response is longer than L.

    When to use: if many responses are cut off at the maximum length. The penalty starts before the limit.
    Watch: `reward/extra/overlong` is the share of responses with a penalty; `response_length/clip_ratio`
        should fall.
    Cost: nothing.
    Source: Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, eq. 13.

    Args:
        response_length: (B) int64, tokens.
        max_length: L, tokens.
        buffer: C, tokens, from 1 to L.
        penalty_factor: f, in units of the reward.
    """
    assert not response_length.is_floating_point(), response_length.dtype
    assert 1 <= buffer <= max_length, (buffer, max_length)
    excess = (response_length - (max_length - buffer)).clamp(min=0).to(torch.float64)
    return -penalty_factor * excess / buffer
