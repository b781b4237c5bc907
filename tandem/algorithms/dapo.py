"""DAPO beside its loss: the prompts that are sampled on, and the punishment of responses that come near the
greatest length.

Shapes: B sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor


def groups_with_spread(values: Tensor, n: int) -> Tensor:
    """The prompts that teach something, whose responses are not all worth the same; (B / n) bool.

    Equation (R_i the values of a prompt's responses):

        kept = max_i R_i > min_i R_i

    Where all are equal, advantages relative to the group are zero.

    When to use: dynamic sampling, with estimators that compare the responses to a prompt.
    Watch: `sampling/dropped_groups` the share of prompts that teach nothing; near one, the data are too easy
        or too hard.
    Cost: further rollouts until a batch is full.
    Source: Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, section 3.2, eq. 11.

    Args:
        values: (B) floats, prompt by prompt, n each.
        n: responses per prompt.
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
    """The reward that a response loses by its length; (B) float64, none above zero.

    Equation 13:
        0                                    |y| <= L - C
        f * ((L - C) - |y|) / C              L - C < |y|

    where |y| is the response's length, L the greatest length, C the buffer and f the factor. At |y| = L,
    beyond which no response goes, that is -f.

    When to use: where many responses are cut at the limit; the punishment grows before they are.
    Watch: `reward/extra/overlong` the share that is punished; `response_length/clip_ratio` should fall.
    Cost: nothing.
    Source: Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, eq. 13.

    Args:
        response_length: (B) int64, tokens.
        max_length: L, tokens.
        buffer: C, tokens, 1 to L.
        penalty_factor: f, in the reward's unit.
    """
    assert not response_length.is_floating_point(), response_length.dtype
    assert 1 <= buffer <= max_length, (buffer, max_length)
    excess = (response_length - (max_length - buffer)).clamp(min=0).to(torch.float64)
    return -penalty_factor * excess / buffer
