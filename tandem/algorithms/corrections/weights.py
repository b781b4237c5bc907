"""Importance weights pi_old / pi_rollout: of a token, of its sequence, and how they are bounded.

Shapes: N tokens of all sequences together, B sequences.
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
    """Each token's own ratio.

    Equation (the exponent clamped to [-20, 20]):

        w_t = exp(log pi_old(t) - log pi_rollout(t))

    Returns:
        (N) weights.

    When to use: the usual choice. Low variance; biased, because the tokens before it are as the rollout
        drew them.
    Watch: `rollout_corr/rollout_is_mean` near 1; `rollout_corr/rollout_is_eff_sample_size` falls as the two
        policies part.
    Cost: nothing beside the log-probs.
    Source: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl.
    """
    return clamped_log_ratio(old_log_probs, rollout_log_probs).exp()


@register_importance_weight("sequence")
def sequence_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, offsets: Tensor
) -> Tensor:
    """The ratio of the whole response, at each of its tokens.

    Equation (the sum clamped to [-20, 20]):

        w_t = exp(sum_s (log pi_old(s) - log pi_rollout(s)))

    Returns:
        (N) weights, zero outside the mask.

    When to use: responses are short, or the two policies are close: unbiased before it is bounded, of a
        variance that grows with length.
    Watch: `rollout_corr/rollout_is_ratio_fraction_high` the share of responses whose weight is cut;
        `rollout_corr/chi2_seq` its variance.
    Cost: nothing beside the log-probs.
    Source: Liu et al. 2025, https://richardli.xyz/rl-collapse.
    """
    sums = segment_sum(torch.where(response_mask, old_log_probs - rollout_log_probs, 0), offsets)
    return spread(sums.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), response_mask, offsets)


@register_importance_weight("geometric")
def geometric_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, offsets: Tensor
) -> Tensor:
    """The geometric mean of a response's ratios, at each of its tokens.

    Equation (T the response's tokens; the mean clamped to [-20, 20]):

        w_t = exp(sum_s (log pi_old(s) - log pi_rollout(s)) / T)

    Returns:
        (N) weights, zero outside the mask.

    When to use: a sequence's weight is wanted that does not grow with its length; biased.
    Watch: `rollout_corr/ppl_ratio`, the mean of its inverse.
    Cost: nothing beside the log-probs.
    Source: Zheng et al. 2025 (GSPO), https://arxiv.org/abs/2507.18071, eq. 7, between these two policies.
    """
    means = segment_mean(old_log_probs - rollout_log_probs, response_mask, offsets)
    return spread(means.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), response_mask, offsets)


def bounded_weights(weights: Tensor, *, lower: float | None, upper: float) -> Tensor:
    """Weights kept from dominating the gradient:

        min(w, upper)                           (lower None: truncated, TIS)
        w where lower <= w <= upper, else 0     (masked on both sides, IcePop)

    Args:
        weights: (N), >= 0.
        lower, upper: the bounds, > 0.

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
    """Weights of mean one over the batch.

    Args:
        weights: (N).
        mask: (N) bool.
        offsets: (B+1) int64.
        by_sequence: the mean over sequences of each one's mean; else over tokens.

    Returns:
        (N) weights, and the scalar mean they were divided by, 1 where it was not above 1e-8.
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
    """The report on importance weights. High and low shares are of the raw weights, low ones those
    below `lower`, or 1 / upper where there is none; so are maximum and minimum of a sequence's weight. All
    else is of the bounded ones.

    Args:
        raw, bounded: (N) weights before and after.
        mask: (N) bool.
        offsets: (B+1) int64.
        lower, upper: the bounds.
        by_sequence: whether all tokens of a sequence have one weight, which is counted once.
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
