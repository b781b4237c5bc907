"""Rejection of tokens or whole sequences for which training and rollout disagree too much.

Rejected tokens do not take part in the update. The name of a mode consists of a level (token, seq_sum,
seq_mean, seq_max) and a divergence (k1, k2, k3) of each token:

    r_t = log pi_old(t) - log pi_rollout(t), clamped to [-20, 20]
    k1_t = -r_t        k2_t = r_t**2 / 2        k3_t = exp(r_t) - 1 - r_t
    token k_t          seq_sum sum_t k_t        seq_mean sum_t k_t / T        seq_max max_t k_t

T is the number of response tokens. The bounds of k1 apply to its exponential: the ratio pi_rollout / pi_old
of a token, the ratio of the sequence (seq_sum), or the geometric mean of the sequence's ratios (seq_mean).

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.algorithms.corrections.registry import (
    Observation,
    clamped_log_ratio,
    register_rejection,
    sequence_observations,
)
from tandem.algorithms.masked import segment_max, segment_mean, segment_sum, spread

DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio.square(),
    "k3": lambda log_ratio: torch.expm1(log_ratio) - log_ratio,
}

_DOCUMENTATION = """Reject {what} by {divergence}{over}.

    Equation (r_t = old_log_probs - rollout_log_probs, clamped to [-20, 20]; T is the number of response
    tokens):

        k_t = {estimate}
        statistic = {statistic}

    When to use: {use}
    Watch: `rollout_corr/rollout_rs_masked_fraction` and `rollout_corr/rollout_rs_seq_masked_fraction` are the
    shares of rejected tokens and sequences. They should be a few percent; if they are much larger, rollout
    and training compute clearly different probabilities.
    Cost: nothing besides the log-probs.

    Returns:
        (N) the statistic; a statistic of a sequence is repeated at each of its tokens.

    Source: the divergences, Schulman 2020, http://joschu.net/blog/kl-approx.html; rejection by them, Liu et
    al. 2025, https://richardli.xyz/rl-collapse.
    """


_ESTIMATES = {"k1": "-r_t", "k2": "r_t**2 / 2", "k3": "exp(r_t) - 1 - r_t"}
_STATISTICS = {"token": "k_t", "seq_sum": "sum_t k_t", "seq_mean": "sum_t k_t / T", "seq_max": "max_t k_t"}
_USES = {
    "token": "the policy should not learn from single tokens on which the two engines disagree.",
    "seq_sum": "you treat a response as one action, whose probability is the product over its tokens. Long\n"
    "    responses are rejected sooner.",
    "seq_mean": "whole responses should be kept or rejected, whatever their length.",
    "seq_max": "a single token with a large difference makes the whole response untrustworthy.",
}
_RATIO = " The lower and upper bounds apply to the ratio pi_rollout / pi_old = exp(statistic)."


def _register(divergence: str, level: str, over: str) -> None:
    estimate = DIVERGENCES[divergence]

    @register_rejection(f"{level}_{divergence}")
    def statistic(
        old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, offsets: Tensor
    ) -> Tensor:
        per_token = estimate(clamped_log_ratio(old_log_probs, rollout_log_probs))
        if level == "token":
            return per_token
        if level == "seq_max":
            return spread(segment_max(per_token, response_mask, offsets), response_mask, offsets)
        if level == "seq_mean":
            return spread(segment_mean(per_token, response_mask, offsets), response_mask, offsets)
        sums = segment_sum(torch.where(response_mask, per_token, 0), offsets)
        return spread(sums, response_mask, offsets)

    statistic.__doc__ = _DOCUMENTATION.format(
        what="tokens" if level == "token" else "whole responses",
        divergence=divergence,
        over=over,
        estimate=_ESTIMATES[divergence],
        statistic=_STATISTICS[level],
        use=_USES[level] + (_RATIO if divergence == "k1" else ""),
    )


for _divergence in DIVERGENCES:
    _register(_divergence, "token", "")
    _register(_divergence, "seq_sum", ", summed over the response")
    _register(_divergence, "seq_mean", ", averaged over the response")
    if _divergence != "k1":  # k1 is signed: its maximum ignores tokens whose ratio is too small
        _register(_divergence, "seq_max", ", its maximum over the response")


def within(statistic: Tensor, *, lower: float | None, upper: float) -> Tensor:
    """Return, for each token, whether the statistic is within the bounds, (N) bool.

    A value equal to a bound is within the bounds. NaN is not.
    """
    inside = statistic <= upper
    return inside if lower is None else inside & (statistic >= lower)


def rejection_observations(
    name: str,
    statistic: Tensor,
    mask: Tensor,
    offsets: Tensor,
    *,
    lower: float | None,
    upper: float,
    by_sequence: bool,
) -> dict[str, Observation]:
    """Return the metrics of one rejection mode, named `rollout_rs_NAME_...`.

    The standard deviation is computed from the statistic clamped to the bounds, so that a few extreme values
    do not dominate the result.

    Args:
        name: the mode.
        statistic: (N).
        mask: (N) bool, the response tokens, including tokens that other modes reject.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.
        lower: lower bound of the statistic, or None.
        upper: upper bound of the statistic.
        by_sequence: whether all tokens of a sequence share one value of the statistic.
    """
    sequence, there = segment_mean(statistic, mask, offsets), segment_sum(mask, offsets) > 0
    kept = within(statistic, lower=lower, upper=upper)
    lowest = 0.0 if lower is None else lower
    seen, counted = (sequence, there) if by_sequence else (statistic, mask)
    found = {
        "mean": Observation(statistic, mask, "mean"),
        "std": Observation(statistic.clamp(lowest, upper), mask, "std"),
        "max": Observation(statistic, mask, "max"),
        "min": Observation(statistic, mask, "min"),
        "fraction_high": Observation(seen > upper, counted, "mean"),
        "masked_fraction": Observation(~kept, mask, "mean"),
        **sequence_observations(sequence, there),
        "seq_max_deviation": Observation(sequence.abs(), there, "max"),
        "seq_fraction_high": Observation(sequence > upper, there, "mean"),
        "seq_masked_fraction": Observation(segment_sum(mask & ~kept, offsets) > 0, there, "mean"),
    }
    if lower is not None:
        found["fraction_low"] = Observation(seen < lower, counted, "mean")
        found["seq_fraction_low"] = Observation(sequence < lower, there, "mean")
    return {f"rollout_rs_{name}_{each}": observation for each, observation in found.items()}
