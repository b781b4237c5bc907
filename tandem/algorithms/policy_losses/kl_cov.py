"""KL-Cov: tokens that would reduce the policy's entropy strongly get a penalty for leaving the old policy.

Shapes: N is the number of tokens of all sequences together.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tandem.algorithms.masked import require_same_shape
from tandem.algorithms.registry import register_policy_loss
from tandem.algorithms.selection import selects_tokens, token_covariances
from tandem.algorithms.surrogate import log_ratio, require_positive


def largest_covariances(
    old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *, kl_cov_ratio: float = 0.0002
) -> Tensor:
    """Select the share kl_cov_ratio of the response tokens with the largest covariances, (N) bool.

    At least one token is selected.

    Args:
        old_log_probs: (N) fp32, nats, of the policy before this batch's updates.
        advantages: (N) fp32.
        response_mask: (N) bool, true at response tokens.
        kl_cov_ratio: the share, > 0; values above 1 select all response tokens.

    Raises:
        ConfigError: kl_cov_ratio is not positive.

    Source: Cui et al. 2025, https://arxiv.org/abs/2505.22617, section 4.2, eq. 13 (KL-Cov).
    """
    require_positive("kl_cov_ratio", kl_cov_ratio)
    tokens = int(response_mask.sum())
    count = min(max(math.floor(kl_cov_ratio * tokens), 1), tokens)
    covariances = token_covariances(old_log_probs, advantages, response_mask)
    chosen = torch.zeros_like(response_mask)
    chosen[covariances.topk(count).indices] = True
    return chosen


@register_policy_loss("kl_cov")
@selects_tokens(largest_covariances)
def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    selected_tokens: Tensor,
    *,
    ppo_kl_coef: float = 0.1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the unclipped loss plus a penalty on a few tokens that would reduce the entropy strongly.

    Equation (d = log_probs - old_log_probs and rho = exp(d), the exponent clamped to [-20, 20]; c is the
    centred product of log-prob and advantage; means are over the response tokens of the batch):

        c_t = (old_log_probs_t - mean(old_log_probs)) * (A_t - mean(A))
        selected = the share kl_cov_ratio of the tokens with the largest c
        l = -rho * A + ppo_kl_coef * |d|    if selected
        l = -rho * A                        otherwise

    The tokens are selected once for the whole batch, before its first update, with the log-probs of the
    policy that wrote the batch, because the covariance describes the entropy of that policy. So the selection
    does not depend on how the batch is split into mini-batches, micro-batches and ranks. The authors' code
    selects again in each micro-batch, with the current policy.

    At d = 0, in the first update of a batch, the penalty has no gradient.

    When to use: if the entropy collapses early and the reward stops rising, with several updates per batch.
        With one update per batch the penalty is always 0. The paper uses kl_cov_ratio=0.002 for 7B, 0.0002
        for 32B, and ppo_kl_coef=1. Usual aggregation: token-mean.
    Watch: `actor/entropy` should fall more slowly; `actor/selected` is the share of tokens with a penalty;
        `actor/ppo_kl` is how far the policy has moved since the samples were written, which nothing else
        bounds.
    Cost: log-probs of the old policy, even with one update per batch: a forward pass without gradient.

    Args:
        log_probs: (N) fp32, nats, of the policy being trained; carries the gradient.
        old_log_probs: (N) fp32, nats, of the policy before this batch's updates.
        advantages: (N) fp32.
        selected_tokens: (N) bool, selected by `largest_covariances`.
        ppo_kl_coef: weight of the penalty, per nat.

    Returns:
        (N) losses, and the per-token metrics selected and ppo_kl (-d).

    Source: Cui et al. 2025, https://arxiv.org/abs/2505.22617, section 4.2, listing 1 (KL-Cov).
    """
    require_same_shape(selected_tokens, log_probs)
    ratio = log_ratio(log_probs, old_log_probs, advantages).exp()
    difference = log_probs - old_log_probs
    penalty = torch.where(selected_tokens, ppo_kl_coef * difference.abs(), 0)
    metrics = {"selected": selected_tokens.to(ratio.dtype), "ppo_kl": -difference.detach()}
    return penalty - advantages * ratio, metrics
