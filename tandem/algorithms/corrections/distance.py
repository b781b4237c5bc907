"""Metrics of the mismatch between the rollout policy and the training policy.

These metrics are reported for every correction, and without a correction.

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.corrections.registry import LOG_RATIO_LIMIT, Observation
from tandem.algorithms.masked import segment_mean, segment_sum


def distance_observations(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, offsets: Tensor
) -> dict[str, Observation]:
    """Return the metrics of the distance between the rollout policy and the training policy.

    p is training's probability of a token, q the rollout's, r = log p - log q, and T the number of response
    tokens:

        kl                  mean over tokens of -r, an estimate of KL(q || p)
        k3_kl               mean over tokens of exp(r) - 1 - r, the same with less variance
        training_ppl        mean over responses of exp(-sum_t log p / T)
        training_log_ppl    mean over responses of -sum_t log p / T
        rollout_ppl         as training_ppl, with q; rollout_log_ppl likewise
        log_ppl_diff        mean over responses of -sum_t r / T
        log_ppl_abs_diff    mean of its absolute value; log_ppl_diff_max and log_ppl_diff_min likewise
        ppl_ratio           mean over responses of exp(-sum_t r / T)
        chi2_token          mean over tokens of exp(2 r) - 1
        chi2_seq            mean over responses of exp(2 sum_t r) - 1

    The exponents of chi2_token and chi2_seq are clamped to [-40, 40].

    Args:
        old_log_probs: (N) fp64, nats, log p.
        rollout_log_probs: (N) fp64, nats, log q.
        response_mask: (N) bool, true at response tokens.
        offsets: (B+1) int64, index of each sequence's first token; the last entry is N.

    Source: kl and k3_kl, Schulman 2020, http://joschu.net/blog/kl-approx.html; the others, Liu et al. 2025,
        https://richardli.xyz/rl-collapse.
    """
    there = segment_sum(response_mask, offsets) > 0
    log_ratio = torch.where(response_mask, old_log_probs - rollout_log_probs, 0)
    training, rollout = (
        -segment_mean(log_probs, response_mask, offsets) for log_probs in (old_log_probs, rollout_log_probs)
    )
    difference = training - rollout
    safe = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    product = segment_sum(log_ratio, offsets).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "kl": Observation(-log_ratio, response_mask, "mean"),
        "k3_kl": Observation(torch.expm1(log_ratio) - log_ratio, response_mask, "mean"),
        "training_ppl": Observation(training.exp(), there, "mean"),
        "training_log_ppl": Observation(training, there, "mean"),
        "rollout_ppl": Observation(rollout.exp(), there, "mean"),
        "rollout_log_ppl": Observation(rollout, there, "mean"),
        "log_ppl_diff": Observation(difference, there, "mean"),
        "log_ppl_abs_diff": Observation(difference.abs(), there, "mean"),
        "log_ppl_diff_max": Observation(difference, there, "max"),
        "log_ppl_diff_min": Observation(difference, there, "min"),
        "ppl_ratio": Observation(difference.exp(), there, "mean"),
        "chi2_token": Observation(torch.expm1(2 * safe), response_mask, "mean"),
        "chi2_seq": Observation(torch.expm1(2 * product), there, "mean"),
    }
