"""Measure the differences between sampling and training engine, and collect evidence of the cause.

The controller combines the evidence and names the cause; see `tandem.watch.trust`.

Shapes: B samples, T their tokens, flat.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.algorithms.masked import segment_sum
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, Ragged

SAMPLED = "rollout_log_probs"
UNTRUNCATED = "rollout_log_probs_untruncated"
FINGERPRINT = "token_fingerprint"
SCORED = "scored_fingerprint"
"""The column with the fingerprints of the samples that a reward worker scored."""
MOMENT = "rollout/moment/"
"""Prefix of the means from which the correlation is computed. These means are not logged as metrics."""
EXPERIMENT = "rollout/experiment/"
"""Prefix of mean differences, in nats, in experiments with a deliberate fault. They are not logged."""
AS_IT_IS = "as_it_is"
"""The name of the experiment without a fault."""

LIMITS = {torch.float64: 1e-7, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
_APART = 0.01


def gap_columns(batch: DataProto) -> frozenset[str]:
    """Return the columns of a batch that `add_rollout_gap` reads; empty without rollout log-probs."""
    return frozenset({SAMPLED, UNTRUNCATED} & set(batch.batch)) if SAMPLED in batch else frozenset()


def add_rollout_gap(
    metrics: Metrics, log_probs_T: Tensor, columns: Mapping[str, Tensor], mask_T: Tensor
) -> None:
    """Add the differences between the sampling engine and the training engine, over the tokens of the mask.

    Let q be the rollout's probability of a token, and p the training engine's probability. The metrics are:
    mean and maximum of |log p - log q| and of |p - q|; the fraction of tokens with |p - q| > 0.01; the mean
    of p/q - 1 - log(p/q), which estimates KL(q ‖ p) (k3 of Schulman 2020, "Approximating KL Divergence"); the
    mean of max(log q - log p, 0), which is the whole difference if tokens were cut from q; moments of p and
    q.

    Args:
        metrics: the metrics to add to.
        log_probs_T: log-probs of training, in nats.
        columns: log-probs of the rollout: `SAMPLED`, and `UNTRUNCATED`, which is compared instead where it
            exists and is not NaN.
        mask_T: the tokens that are compared.
    """
    sampled_T = compared(columns)
    count = mask_T.sum()
    gap_T = torch.where(mask_T, log_probs_T - sampled_T, 0.0).double()
    p_T = torch.where(mask_T, log_probs_T.exp(), 0.0).double()
    q_T = torch.where(mask_T, sampled_T.exp(), 0.0).double()
    apart_T = (p_T - q_T).abs()
    metrics.add_max("rollout/log_prob_diff_max", gap_T.abs().max())
    metrics.add_max("rollout/prob_diff_max", apart_T.max())
    for name, values_T in {
        "log_prob_diff_mean": gap_T.abs(),
        "log_prob_diff_raised": (-gap_T).clamp(min=0),
        "kl": gap_T.expm1() - gap_T,
        "prob_diff_mean": apart_T,
        "prob_diff_share": (apart_T > _APART).double(),
        "moment/p": p_T,
        "moment/q": q_T,
        "moment/pp": p_T * p_T,
        "moment/qq": q_T * q_T,
        "moment/pq": p_T * q_T,
    }.items():
        metrics.add_mean(f"rollout/{name}", values_T.sum(), count)


def compared(columns: Mapping[str, Tensor]) -> Tensor:
    """Return (T), nats: the rollout's log-probs, from before truncation of its distribution if known."""
    sampled_T = columns[SAMPLED]
    if UNTRUNCATED not in columns:
        return sampled_T
    return torch.where(columns[UNTRUNCATED].isnan(), sampled_T, columns[UNTRUNCATED])


def add_evidence(metrics: Metrics, batch: DataProto, version: int, limit: float) -> None:
    """Add the evidence that distinguishes the causes of a difference to the metrics.

    The evidence is: the number of optimizer steps by which the oldest weights that generated a token are
    behind the training weights; the number of samples whose tokens differ from the tokens that the engine
    generated; whether the engine only returned log-probs of a reshaped distribution; and the limit.

    Args:
        metrics: the metrics to add to.
        batch: samples, with `policy_version` and `FINGERPRINT` if the rollout returned them.
        version: the version of the training weights.
        limit: the limit of the difference, in nats.
    """
    metrics.add_max("rollout/log_prob_diff_limit", limit)
    mask = batch.ragged("response_mask").values
    if UNTRUNCATED in batch:
        missing = batch.ragged(UNTRUNCATED).values[mask].isnan().any()
        metrics.add_max("rollout/untruncated_missing", float(missing))
    if "policy_version" in batch:
        written = batch.ragged("policy_version").values[mask]
        metrics.add_max("rollout/version_lag", float(version - written.min()) if len(written) else 0.0)
    if FINGERPRINT in batch:
        found_B = fingerprint(batch.ragged("tokens"))
        metrics.add_sum("rollout/changed_samples", (found_B != batch.dense(FINGERPRINT)).sum())


def difference_limit(configured: float | None, dtype: torch.dtype, temperature: float) -> float:
    """Return the limit of the mean difference, in nats, above which the run reports the cause.

    A difference above `LIMITS` is more than rounding: 1e-3 to 1e-2 is common between two bf16 engines, and
    1e-6 between two fp32 engines.

    Args:
        configured: the limit in the config; None: the limit depends on the data type.
        dtype: the data type of the forward pass.
        temperature: the sampling temperature. A value below 1 magnifies the rounding of the logits.
    """
    return configured if configured is not None else LIMITS[dtype] / min(1.0, temperature)


def fingerprint(tokens: Ragged) -> Tensor:
    """Return (B) int64: Σ_t (t + 1)(token_t + 1) of each sample.

    A changed, added or moved token changes the result.
    """
    return segment_sum((tokens.positions() + 1) * (tokens.values + 1), tokens.offsets)
