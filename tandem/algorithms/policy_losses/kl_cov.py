"""KL-Cov: tokens that would cost the policy much of its entropy are held to the old policy."""

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
    """(N) bool: the share kl_cov_ratio of the response tokens, at least one, with the largest covariances.

    Args:
        kl_cov_ratio: the share, in (0, 1].

    Raises:
        ConfigError: a share outside (0, 1].

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
    """The surrogate without clip, with a penalty at a few tokens that would cost the policy much of its
    entropy.

    Equation (d = log_probs - old_log_probs and rho = exp(d), the exponent clamped to [-20, 20]; c the
    centred product of log-prob and advantage; means over the response tokens of the batch):

        c_t = (old_log_probs_t - mean(old_log_probs)) * (A_t - mean(A))
        selected = the share kl_cov_ratio of the tokens with the largest c
        l = -rho * A + ppo_kl_coef * |d|    where selected
        l = -rho * A                        else

    The choice is made once for the whole batch, before its first update and under the policy that wrote it,
    whose entropy it is that the covariance tells of. So it is the same for every division into mini-batches,
    micro-batches and ranks. Authors' code chooses anew in each micro-batch, under the policy of the moment.
    At d = 0, the first update of a batch, the penalty has no gradient.

    When to use: where the entropy collapses early and reward stops with it, with several updates per batch:
    with one the penalty is always zero. The paper has kl_cov_ratio=0.002 for 7B, 0.0002 for 32B, and
    ppo_kl_coef=1. Usual aggregation: token-mean.
    Watch: `actor/entropy` should fall more slowly; `actor/selected` the share of tokens penalised;
    `actor/ppo_kl` how far the policy has moved since the samples were written, which nothing else bounds.
    Cost: log-probs of the old policy even with one update per batch: a forward without gradient.

    Args:
        selected_tokens: chosen by `largest_covariances`.
        ppo_kl_coef: weight of the penalty, per nat.

    Returns:
        (N) losses, and per token: selected, ppo_kl (-d).

    Source: Cui et al. 2025, https://arxiv.org/abs/2505.22617, section 4.2, listing 1 (KL-Cov).
    """
    require_same_shape(selected_tokens, log_probs)
    ratio = log_ratio(log_probs, old_log_probs, advantages).exp()
    difference = log_probs - old_log_probs
    penalty = torch.where(selected_tokens, ppo_kl_coef * difference.abs(), 0)
    metrics = {"selected": selected_tokens.to(ratio.dtype), "ppo_kl": -difference.detach()}
    return penalty - advantages * ratio, metrics
