"""Clip-Cov: tokens that would reduce the policy's entropy strongly get no gradient.

Shapes: N is the number of tokens of all sequences together.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tandem.algorithms.masked import require_same_shape
from tandem.algorithms.registry import register_policy_loss
from tandem.algorithms.selection import selects_tokens, token_covariances
from tandem.algorithms.surrogate import clipped_surrogate, log_ratio, require_positive

_SEED = 22617
"""The seed of the random selection. All steps can share one seed, because their samples differ."""


def covariances_between(
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> Tensor:
    """Select tokens at random among those whose covariance lies between two bounds, (N) bool.

    The number of selected tokens is the share clip_cov_ratio of all response tokens, and at least 1. If there
    are fewer candidates, all of them are selected. The same inputs give the same selection.

    Args:
        old_log_probs: (N) fp32, nats, of the policy before this batch's updates.
        advantages: (N) fp32.
        response_mask: (N) bool, true at response tokens.
        clip_cov_ratio: the share of the response tokens to select, > 0.
        clip_cov_lb: lower bound of the covariance, exclusive, in nats times the unit of the advantages.
        clip_cov_ub: upper bound of the covariance, exclusive, in nats times the unit of the advantages.

    Raises:
        ConfigError: clip_cov_ratio is not positive.

    Source: Cui et al. 2025, https://arxiv.org/abs/2505.22617, section 4.2, eq. 11 (Clip-Cov).
    """
    require_positive("clip_cov_ratio", clip_cov_ratio)
    covariances = token_covariances(old_log_probs, advantages, response_mask)
    candidates = ((covariances > clip_cov_lb) & (covariances < clip_cov_ub)).nonzero().squeeze(1)
    count = max(math.floor(clip_cov_ratio * int(response_mask.sum())), 1)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(_SEED))
    chosen = torch.zeros_like(response_mask)
    chosen[candidates[order[:count].to(candidates.device)]] = True
    return chosen


@register_policy_loss("clip_cov")
@selects_tokens(covariances_between)
def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    selected_tokens: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's clipped loss, without the loss of a few tokens that would reduce the entropy strongly.

    Equation (rho = exp(log_probs - old_log_probs), the exponent clamped to [-20, 20]; c is the centred
    product of log-prob and advantage; means are over the response tokens of the batch):

        c_t = (old_log_probs_t - mean(old_log_probs)) * (A_t - mean(A))
        selected = a random share clip_cov_ratio of the tokens, among those with
            clip_cov_lb < c < clip_cov_ub
        l = 0                                                   if selected
        l = max(-rho * A, -clip(rho, 1 - low, 1 + high) * A)    otherwise

    The tokens are selected once for the whole batch, before its first update, with the log-probs of the
    policy that wrote the batch, because the covariance describes the entropy of that policy. So the selection
    does not depend on how the batch is split into mini-batches, micro-batches and ranks. The authors' code
    selects again in each micro-batch, with the current policy.

    A selected token that PPO's clip already stops keeps its loss, which has no gradient.

    When to use: if the entropy collapses early and the reward stops rising. Usual aggregation: token-mean.
    Watch: `actor/entropy` should fall more slowly; `actor/selected` is the share of tokens without a loss,
        and should be near clip_cov_ratio unless there are too few candidates; `actor/clip_fraction` is the
        share of tokens that PPO's clip stops; `actor/ppo_kl` is how far the policy has moved since the
        samples were written.
    Cost: log-probs of the old policy, even with one update per batch: a forward pass without gradient.

    Args:
        log_probs: (N) fp32, nats, of the policy being trained; carries the gradient.
        old_log_probs: (N) fp32, nats, of the policy before this batch's updates.
        advantages: (N) fp32.
        selected_tokens: (N) bool, selected by `covariances_between`.
        clip_ratio_low: how far the ratio may fall below 1.
        clip_ratio_high: how far the ratio may rise above 1.

    Returns:
        (N) losses, and the per-token metrics selected, clip_fraction and ppo_kl (-log rho).

    Source: Cui et al. 2025, https://arxiv.org/abs/2505.22617, section 4.2, eq. 12 (Clip-Cov).
    """
    require_same_shape(selected_tokens, log_probs)
    difference = log_ratio(log_probs, old_log_probs, advantages)
    losses, clipped = clipped_surrogate(difference.exp(), advantages, clip_ratio_low, clip_ratio_high)
    silent = selected_tokens & ~clipped
    metrics = {
        "selected": silent.to(losses.dtype),
        "clip_fraction": clipped.to(losses.dtype),
        "ppo_kl": -difference.detach(),
    }
    return torch.where(silent, 0, losses), metrics
