"""Policy losses that treat some tokens apart, chosen once over a whole batch, and the covariance that two of
them choose by.

Shapes: N tokens of all sequences together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.algorithms.masked import masked_mean, require_same_shape
from tandem.algorithms.registry import SELECTIONS, Function, Selection, declared


def selects_tokens(choice: Callable[..., Tensor]) -> Callable[[Function], Function]:
    """A decorator of a policy loss that treats some tokens apart, such as the largest of all. `choice` says
    which, once for a whole batch, so that no division into micro-batches or ranks changes the loss:

        @register_policy_loss("mine")
        @selects_tokens(choice)
        def mine(log_probs, advantages, selected_tokens, *, weight=1.0): ...

    Args:
        choice: returns (N) bool; its signature declares columns and options as that of a loss does.

    Raises:
        ConfigError: a signature that is no declaration.
    """

    def decorate(fn: Function) -> Function:
        SELECTIONS[fn] = declared(Selection, choice.__name__, choice)
        return fn

    return decorate


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
    require_same_shape(log_probs, advantages, mask)
    log_probs, advantages = log_probs.double(), advantages.double()
    products = (log_probs - masked_mean(log_probs, mask)) * (advantages - masked_mean(advantages, mask))
    return torch.where(mask, products, -torch.inf)
