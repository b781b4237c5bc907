"""How much each token's update moves the entropy of the policy.

Shapes: N tokens of all sequences together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.masked import masked_mean


def token_covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Each token's share of the covariance of log-prob and advantage, over the tokens that count.

        c_t = (log_probs_t - mean(log_probs)) * (A_t - mean(A))

    Under a policy gradient the entropy falls about as fast as the mean of c is large: likely tokens that are
    made likelier take it away.

    Args:
        log_probs: (N) nats.
        advantages: (N) A.
        mask: (N) bool, the tokens that count; the means are over them.

    Returns:
        (N) float64, minus infinity where the mask is false.

    Source: Cui et al. 2025, https://arxiv.org/abs/2505.22617, section 4.2, eq. 10; theorem 2.
    """
    assert log_probs.shape == advantages.shape == mask.shape, (
        log_probs.shape,
        advantages.shape,
        mask.shape,
    )
    log_probs, advantages = log_probs.double(), advantages.double()
    products = (log_probs - masked_mean(log_probs, mask)) * (advantages - masked_mean(advantages, mask))
    return torch.where(mask, products, -torch.inf)
