"""Importance weights pi_old / pi_rollout of a token or its sequence, and their bounds.

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.corrections.registry import (
    LOG_RATIO_LIMIT,
    Observation,
    clamped_log_ratio,
    register_importance_weight,
    sequence_observations,
)
from tandem.algorithms.masked import masked_mean, segment_mean, segment_sum, spread


@register_importance_weight("token")
def token_weights(old_log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """Return the probability ratio of each token.

    Equation (the exponent is clamped to [-20, 20]):

        w_t = exp(log pi_old(t) - log pi_rollout(t))

    Args:
        old_log_probs: (N) fp64, nats, of the policy before this batch's updates, as training computes them.
        rollout_log_probs: (N) fp64, nats, of the engine that sampled.

    Returns:
        (N) weights.

    When to use: the usual choice. The variance is low. The weight is biased, because it does not correct the
        tokens before it, which the rollout policy drew.
    Watch: `rollout_corr/rollout_is_mean` should be near 1; `rollout_corr/rollout_is_eff_sample_size` falls as
        the two policies move apart.
    Cost: nothing besides the log-probs.
    Source: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl.
    """
    return clamped_log_ratio(old_log_probs, rollout_log_probs).exp()


@register_importance_weight("sequence")
def sequence_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, offsets: Tensor
) -> Tensor:
    """Return the probability ratio of the whole response, repeated at each of its tokens.

    Equation (the sum is clamped to [-20, 20]):

        w_t = exp(sum_s (log pi_old(s) - log pi_rollout(s)))

    Args:
        old_log_probs: (N) fp64, nats, of the policy before this batch's updates, as training computes them.
        rollout_log_probs: (N) fp64, nats, of the engine that sampled.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.

    Returns:
        (N) weights, 0 outside the mask.

    When to use: short responses, or two policies that are close. The weight is unbiased before bounds are
        applied, but its variance grows with the length.
    Watch: `rollout_corr/rollout_is_ratio_fraction_high` is the share of responses whose weight is cut;
        `rollout_corr/chi2_seq` measures the variance of the weight.
    Cost: nothing besides the log-probs.
    Source: Liu et al. 2025, https://richardli.xyz/rl-collapse.
    """
    sums = segment_sum(torch.where(response_mask, old_log_probs - rollout_log_probs, 0), offsets)
    return spread(sums.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), response_mask, offsets)


@register_importance_weight("geometric")
def geometric_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, offsets: Tensor
) -> Tensor:
    """Return the geometric mean of the response's ratios, repeated at each of its tokens.

    Equation (T is the number of response tokens; the mean is clamped to [-20, 20]):

        w_t = exp(sum_s (log pi_old(s) - log pi_rollout(s)) / T)

    Args:
        old_log_probs: (N) fp64, nats, of the policy before this batch's updates, as training computes them.
        rollout_log_probs: (N) fp64, nats, of the engine that sampled.
        response_mask: (N) bool, true at response tokens, which are the tokens that the policy wrote.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.

    Returns:
        (N) weights, 0 outside the mask.

    When to use: if you want one weight per sequence that does not grow with the sequence's length. The weight
        is biased.
    Watch: `rollout_corr/ppl_ratio`, the mean of the inverse of this weight.
    Cost: nothing besides the log-probs.
    Source: Zheng et al. 2025 (GSPO), https://arxiv.org/abs/2507.18071, eq. 7, between these two policies.
    """
    means = segment_mean(old_log_probs - rollout_log_probs, response_mask, offsets)
    return spread(means.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), response_mask, offsets)


def bounded_weights(weights: Tensor, *, lower: float | None, upper: float) -> Tensor:
    """Bound the weights so that no single weight dominates the gradient.

        min(w, upper)                           (lower is None: truncation, TIS)
        w if lower <= w <= upper, else 0        (masking on both sides, IcePop)

    Args:
        weights: (N), >= 0.
        lower: lower bound, > 0, or None.
        upper: upper bound, > 0.

    Source: Ionides 2008, J. Comp. Graph. Stat. 17 (truncation), for this use Yao et al. 2025,
        https://fengyao.notion.site/off-policy-rl; masking on both sides, Ling Team 2025,
        https://arxiv.org/abs/2510.18855, section 2.3.2, eq. 1 and 2.
    """
    if lower is None:
        return weights.clamp(max=upper)
    return torch.where((weights >= lower) & (weights <= upper), weights, 0)


def normalised_weights(
    weights: Tensor, mask: Tensor, offsets: Tensor, *, by_sequence: bool
) -> tuple[Tensor, Tensor]:
    """Divide the weights by their mean over the batch.

    Args:
        weights: (N).
        mask: (N) bool, the tokens that count.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        by_sequence: if true, the mean is over sequences of each sequence's mean; otherwise it is over tokens.

    Returns:
        (N) weights with mean 1, and the scalar mean that they were divided by. If the mean is not above 1e-8,
        the weights are divided by 1 instead.
    """
    if by_sequence:
        there = segment_sum(mask, offsets) > 0
        mean = segment_mean(weights, mask, offsets).sum() / there.sum().clamp(min=1)
    else:
        mean = masked_mean(weights, mask)
    mean = torch.where(mean > 1e-8, mean, 1.0)
    return weights / mean, mean


def weight_observations(
    raw: Tensor,
    bounded: Tensor,
    mask: Tensor,
    offsets: Tensor,
    *,
    lower: float | None,
    upper: float,
    by_sequence: bool,
) -> dict[str, Observation]:
    """Return the metrics of the importance weights, named `rollout_is_...`.

    The high share is the fraction of raw weights above `upper`. The low share is the fraction of raw weights
    below `lower`, or below 1 / upper if `lower` is None. If all tokens of a sequence share one weight, the
    maximum and minimum are those of the raw weights. All other metrics are computed from the bounded weights.

    Args:
        raw: (N) weights before the bounds.
        bounded: (N) weights after the bounds.
        mask: (N) bool, the tokens that count.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        lower: lower bound, or None.
        upper: upper bound.
        by_sequence: whether all tokens of a sequence share one weight, which is then counted once in the high
            and low shares.
    """
    there = segment_sum(mask, offsets) > 0
    below = 1 / upper if lower is None else lower
    raw_means, bounded_means = (segment_mean(weights, mask, offsets) for weights in (raw, bounded))
    seen, counted = (raw_means, there) if by_sequence else (raw, mask)
    extreme = raw if by_sequence else bounded
    found = {
        "mean": Observation(bounded, mask, "mean"),
        "std": Observation(bounded, mask, "std"),
        "eff_sample_size": Observation(bounded, mask, "ess"),
        "max": Observation(extreme, mask, "max"),
        "min": Observation(extreme, mask, "min"),
        "ratio_fraction_high": Observation(seen > upper, counted, "mean"),
        "ratio_fraction_low": Observation(seen < below, counted, "mean"),
        **sequence_observations(bounded_means, there),
        "seq_max_deviation": Observation((bounded_means - 1).abs(), there, "max"),
        "seq_fraction_high": Observation(raw_means > upper, there, "mean"),
        "seq_fraction_low": Observation(raw_means < below, there, "mean"),
    }
    if lower is not None:
        found["oob_ratio"] = Observation((raw < lower) | (raw > upper), mask, "mean")
    return {f"rollout_is_{name}": observation for name, observation in found.items()}
