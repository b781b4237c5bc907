"""The divergence and the masked policy gradient of the DPPO losses.

Shapes: N is the number of tokens of all sequences together.
"""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.surrogate import log_ratio, require_positive

_LEAST = 1e-8
"""The number added to the total probability of all other tokens, which may be 0."""


def binary_kl(old_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    """Return KL(old || new) of the choice between a token and all other tokens, in nats.

        q * log(q / p) + (1 - q) * log((1 - q) / (1 - p)),  with 1e-8 added to both 1 - q and 1 - p

    Args:
        old_log_probs: (N) log q, nats.
        log_probs: (N) log p, nats.

    Source: Qi et al. 2026, https://arxiv.org/abs/2602.04879, section 4.4 (the binary approximation).
    """
    old = old_log_probs.exp()
    others_old, others = -old_log_probs.expm1() + _LEAST, -log_probs.expm1() + _LEAST
    return old * (old_log_probs - log_probs) + (1 - old) * (others_old.log() - others.log())


def masked_policy_gradient(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, inside: Tensor, bound: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -sg(min(rho, c) * inside) * A * log_probs, with rho = exp(log_probs - old_log_probs).

    Args:
        log_probs: (N) nats, carries the gradient.
        old_log_probs: (N) nats.
        advantages: (N) A.
        inside: (N) bool, the tokens that learn.
        bound: c, > 0.

    Returns:
        (N) losses, and the per-token metrics clip_fraction (1 outside), clip_fraction_lower (1 inside if the
        ratio is cut) and ppo_kl (-log rho).

    Raises:
        ConfigError: the bound is not positive.
    """
    require_positive("clip_ratio_c", bound)
    difference = log_ratio(log_probs, old_log_probs, advantages).detach()
    ratio = difference.exp()
    weight = ratio.clamp(max=bound) * inside
    metrics = {
        "clip_fraction": (~inside).to(ratio.dtype),
        "clip_fraction_lower": (inside & (ratio > bound)).to(ratio.dtype),
        "ppo_kl": -difference,
    }
    return -advantages * weight * log_probs, metrics
