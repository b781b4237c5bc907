"""Token selections for policy losses, made once over a whole batch.

Some policy losses treat selected tokens differently. The losses clip_cov and kl_cov select tokens by the
covariance of log-prob and advantage.

Shapes: N is the number of tokens of all sequences together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.algorithms.masked import masked_mean, require_same_shape
from tandem.algorithms.registry import SELECTIONS, Function, Selection, declared


def selects_tokens(choice: Callable[..., Tensor]) -> Callable[[Function], Function]:
    """Return a decorator for a policy loss that treats selected tokens differently.

    `choice` selects the tokens once for a whole batch, for example the tokens with the largest values. So the
    loss does not depend on how the batch is split into micro-batches and ranks:

        @register_policy_loss("mine")
        @selects_tokens(choice)
        def mine(log_probs, advantages, selected_tokens, *, weight=1.0): ...

    Args:
        choice: returns (N) bool. Its signature declares columns and options like that of a loss.

    Raises:
        ConfigError: the signature of `choice` is not a valid declaration.
    """

    def decorate(fn: Function) -> Function:
        SELECTIONS[fn] = declared(Selection, choice.__name__, choice)
        return fn

    return decorate


def token_covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return each token's term of the covariance of log-prob and advantage, over the masked tokens.

        c_t = (log_probs_t - mean(log_probs)) * (A_t - mean(A))

    With the policy gradient, the entropy falls roughly in proportion to the mean of c: it falls when likely
    tokens become even more likely.

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
