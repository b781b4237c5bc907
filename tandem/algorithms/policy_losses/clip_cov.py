"""Clip-Cov: tokens that would cost the policy much of its entropy do not learn."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tandem.algorithms.masked import require_same_shape
from tandem.algorithms.registry import register_policy_loss
from tandem.algorithms.selection import selects_tokens, token_covariances
from tandem.algorithms.surrogate import clipped_surrogate, log_ratio, require_positive

_SEED = 22617
"""The seed of the choice among candidates. One number serves all steps: the samples differ."""


def covariances_between(
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> Tensor:
    """(N) bool: a random choice among the tokens whose covariance lies between two bounds.

    Of all response tokens the share clip_cov_ratio, at least one token, or all candidates if they are fewer.
    The same columns give the same choice.

    Args:
        clip_cov_ratio: the share of the response tokens to choose, > 0.
        clip_cov_lb, clip_cov_ub: the bounds, nats times the advantages' unit, both exclusive.

    Raises:
        ConfigError: a share that is not positive.

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
    """PPO's clipped surrogate, silent at a few tokens that would cost the policy much of its entropy.

    Equation (rho = exp(log_probs - old_log_probs), the exponent clamped to [-20, 20]; c the centred product
    of log-prob and advantage; means over the response tokens of the batch):

        c_t = (old_log_probs_t - mean(old_log_probs)) * (A_t - mean(A))
        selected = a random share clip_cov_ratio of the tokens, among those with
            clip_cov_lb < c < clip_cov_ub
        l = 0                                                   where selected
        l = max(-rho * A, -clip(rho, 1 - low, 1 + high) * A)    else

    The choice is made once for the whole batch, before its first update and under the policy that wrote it,
    whose entropy it is that the covariance tells of. So it is the same for every division into mini-batches,
    micro-batches and ranks. Authors' code chooses anew in each micro-batch, under the policy of the moment.
    A selected token that PPO's clip has silenced already keeps its loss, which has no gradient.

    When to use: where the entropy collapses early and reward stops with it. Usual aggregation: token-mean.
    Watch: `actor/entropy` should fall more slowly; `actor/selected` the share of tokens silenced, near
    clip_cov_ratio unless there are too few candidates; `actor/clip_fraction` tokens that PPO's clip
    silences; `actor/ppo_kl` how far the policy has moved since the samples were written.
    Cost: log-probs of the old policy even with one update per batch: a forward without gradient.

    Args:
        selected_tokens: chosen by `covariances_between`.
        clip_ratio_low, clip_ratio_high: how far the ratio may fall below and rise above one.

    Returns:
        (N) losses, and per token: selected, clip_fraction, ppo_kl (-log rho).

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
