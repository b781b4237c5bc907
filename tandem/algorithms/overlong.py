"""The soft punishment of responses that come near the greatest length."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_overlong_punishment(
    response_length: Tensor, *, max_length: int, buffer: int, penalty_factor: float = 1.0
) -> Tensor:
    """What a response's length takes off its reward; (B) float64, none above zero.

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
