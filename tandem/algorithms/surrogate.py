"""The ratio of the two policies and PPO's clipped surrogate, which policy losses share.

Shapes: N tokens of all sequences together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.masked import require_same_shape
from tandem.errors import ConfigError

_MOST = 20.0
"""Nats. A ratio of e^20 is no estimate of anything, and its exponential stays finite."""


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """(N): log_probs - old_log_probs, clamped to [-20, 20], beyond which no gradient flows.

    Args:
        log_probs: (N) nats, carries the gradient.
        old_log_probs: (N) nats.
        advantages: (N); only its shape is looked at.
    """
    require_same_shape(log_probs, old_log_probs, advantages)
    return (log_probs - old_log_probs).clamp(-_MOST, _MOST)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """max(-rho * A, -clip(rho, 1 - low, 1 + high) * A).

    Args:
        ratio: (N) rho, carries the gradient.
        advantages: (N) A.
        low, high: how far the ratio may fall below and rise above one.

    Returns:
        (N) losses, which carry the gradient; (N) bool, where the clipped term is the larger, so that no
        gradient flows.

    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7.
    """
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, bounded), bounded > plain


def require_positive(name: str, value: float) -> None:
    """
    Raises:
        ConfigError: the option is not above zero.
    """
    if value <= 0:
        raise ConfigError("out of range", field=name, got=value, expected="> 0")
