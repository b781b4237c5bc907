"""The ratio of two policies and PPO's clipped surrogate loss, shared by several policy losses.

Shapes: N is the number of tokens of all sequences together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.masked import require_same_shape
from tandem.errors import ConfigError

_MOST = 20.0
"""The bound of log-ratios, in nats. A larger ratio is not a meaningful estimate and may overflow."""


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Return log_probs - old_log_probs, clamped to [-20, 20], (N).

    Clamped values have no gradient.

    Args:
        log_probs: (N) nats, carries the gradient.
        old_log_probs: (N) nats.
        advantages: (N); only its shape is checked.
    """
    require_same_shape(log_probs, old_log_probs, advantages)
    return (log_probs - old_log_probs).clamp(-_MOST, _MOST)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return max(-rho * A, -clip(rho, 1 - low, 1 + high) * A), PPO's clipped loss per token.

    Args:
        ratio: (N) rho, carries the gradient.
        advantages: (N) A.
        low: how far the ratio may fall below 1.
        high: how far the ratio may rise above 1.

    Returns:
        (N) losses, which carry the gradient; (N) bool, true where the clipped term is the larger, so that the
        token has no gradient.

    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7.
    """
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, bounded), bounded > plain


def require_positive(name: str, value: float) -> None:
    """Check that an option is above 0.

    Raises:
        ConfigError: the value is not positive.
    """
    if value <= 0:
        raise ConfigError("out of range", field=name, got=value, expected="> 0")
