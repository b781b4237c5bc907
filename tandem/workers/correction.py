"""The rollout correction of a run, as the config says: importance weights and rejection, put together from
the algorithms' pure functions, and where they are applied.

Old log-probs that are a column of the batch are compared with the rollout's once, before the updates; the
batch gets the columns `rollout_is_weights` and `kept_mask`. Where none are recomputed (one update per batch,
whose own are the old ones; or bypass mode, where the policy being trained is compared with the rollout) the
loss compares, of each micro-batch. How many tokens it keeps is known when all are through: the gradient is
linear in one over that number, and is rescaled then.

Shapes: N tokens of all sequences together, B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from tandem.algorithms.corrections.distance import distance_observations
from tandem.algorithms.corrections.registry import (
    Observation,
    importance_weight,
    rejection,
)
from tandem.algorithms.corrections.rejection import rejection_observations, within
from tandem.algorithms.corrections.weights import bounded_weights, normalised_weights, weight_observations
from tandem.algorithms.masked import segment_sum
from tandem.config.actor import ActorConfig
from tandem.config.rollout_correction import RolloutCorrectionConfig
from tandem.engines.train.base import Counts
from tandem.errors import EngineError
from tandem.observability.metrics import Metrics, Spread
from tandem.protocol import DataProto, Ragged
from tandem.watch.gap import SAMPLED

KEPT = "kept_mask"
"""Response tokens that were not rejected, ragged bool."""
WEIGHTS = "rollout_is_weights"
PREFIX = "rollout_corr/"
_TOKENS, _SEQUENCES = f"{PREFIX}kept_tokens", f"{PREFIX}kept_sequences"


class Corrected(NamedTuple):
    """The result of a correction.

    Attributes:
        weights: (N), detached, zero outside the mask; None without importance weights.
        kept: (N) bool, the tokens of the mask that were not rejected.
    """

    weights: Tensor | None
    kept: Tensor


class Correction:
    """Importance weights, rejection, and the measures of both.

    Args:
        config: the resolved section.

    Attributes:
        weight: of a token, before it is bounded; None without.
        rejections: the statistics, each with its bounds; a token is kept if it is within all.

    Raises:
        ConfigError: a user's function that cannot be used.
    """

    def __init__(self, config: RolloutCorrectionConfig) -> None:
        self.config = config
        weight, bounds = config.applied_weight, config.rejection_bounds if config.rollout_rs else ()
        self.weight = None if weight is None else importance_weight(weight)
        self.rejections = tuple(zip(map(rejection, config.rollout_rs), bounds, strict=True))

    @torch.no_grad()
    def __call__(
        self, log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, offsets: Tensor, metrics: Metrics
    ) -> Corrected:
        """Compares training's log-probs with the rollout's.

        Args:
            log_probs, rollout_log_probs: (N) nats.
            mask: (N) bool, response tokens.
            offsets: (B+1) int64.
            metrics: gets `rollout_corr/...`.
        """
        columns = {
            "old_log_probs": torch.where(mask, log_probs, 0).double(),
            "rollout_log_probs": torch.where(mask, rollout_log_probs, 0).double(),
            "response_mask": mask,
            "offsets": offsets,
        }
        add_observations(metrics, distance_observations(*columns.values()))
        weights = self._weights(columns, metrics)
        kept = self._kept(columns, metrics)
        return Corrected(None if weights is None else weights.to(log_probs.dtype), kept)

    def _weights(self, columns: Mapping[str, Tensor], metrics: Metrics) -> Tensor | None:
        if self.weight is None:
            return None
        mask, offsets, shared = columns["response_mask"], columns["offsets"], self.weight.by_sequence
        lower, upper = self.config.weight_bounds.lower, self.config.weight_bounds.upper
        raw = torch.where(mask, self.weight(columns).double(), 0)
        weights = bounded_weights(raw, lower=lower, upper=upper)
        seen = weight_observations(raw, weights, mask, offsets, lower=lower, upper=upper, by_sequence=shared)
        add_observations(metrics, seen)
        if self.config.rollout_is_batch_normalize:
            weights, factor = normalised_weights(weights, mask, offsets, by_sequence=shared)
            metrics.add_mean(f"{PREFIX}rollout_is_batch_norm_factor", factor, 1.0)
        return weights

    def _kept(self, columns: Mapping[str, Tensor], metrics: Metrics) -> Tensor:
        mask, offsets = columns["response_mask"], columns["offsets"]
        kept = mask
        for spec, bounds in self.rejections:
            lower, upper, statistic = bounds.lower, bounds.upper, spec(columns)
            name, shared = spec.name.rpartition(":")[2], spec.by_sequence
            seen = rejection_observations(
                name, statistic, mask, offsets, lower=lower, upper=upper, by_sequence=shared
            )
            add_observations(metrics, seen)
            kept = kept & within(statistic, lower=lower, upper=upper)
        if self.rejections:
            there, lost = segment_sum(mask, offsets) > 0, segment_sum(mask & ~kept, offsets) > 0
            overall = {
                "rollout_rs_masked_fraction": Observation(~kept, mask, "mean"),
                "rollout_rs_seq_masked_fraction": Observation(lost, there, "mean"),
            }
            add_observations(metrics, overall)
        return kept


def add_observations(metrics: Metrics, found: Mapping[str, Observation]) -> None:
    """Under `rollout_corr/`. What is observed of several parts adds up to that of the whole."""
    for name, (values, counted, reduction) in found.items():
        name, values = PREFIX + name, values.double()
        inside = torch.where(counted, values, 0.0)
        if reduction == "mean":
            metrics.add_mean(name, inside.sum(), counted.sum())
        elif reduction == "max":
            metrics.add_max(name, torch.where(counted, values, -torch.inf).max())
        elif reduction == "min":
            metrics.add_min(name, torch.where(counted, values, torch.inf).min())
        else:
            spread = cast(Spread, reduction)
            metrics.add_spread(name, spread, inside.sum(), inside.square().sum(), counted.sum())


def correction_columns(correction: Correction, batch: DataProto, metrics: Metrics) -> dict[str, Ragged]:
    """The columns that are known before the updates: in bypass mode `old_log_probs`, the rollout's; else,
    where they were recomputed, `rollout_is_weights` and `kept_mask` by what is asked for.

    Args:
        metrics: gets `rollout_corr/...`.

    Raises:
        EngineError: the rollout gave no log-probs.
    """
    if not (correction.config.corrects or correction.config.bypass_mode):
        return {}
    check_rollout_log_probs(batch)
    if correction.config.bypass_mode:
        return {"old_log_probs": batch.ragged(SAMPLED)}
    if "old_log_probs" not in batch:
        return {}
    mask = batch.ragged("response_mask")
    old, sampled = batch.ragged("old_log_probs").values, batch.ragged(SAMPLED).values
    weights, kept = correction(old, sampled, mask.values, mask.offsets, metrics)
    columns = {} if weights is None else {WEIGHTS: mask.with_values(weights)}
    return columns | ({KEPT: mask.with_values(kept)} if correction.rejections else {})


def bypassing(actor: ActorConfig, loss_type: str) -> ActorConfig:
    """The section with the policy loss of bypass mode."""
    kwargs = {**actor.policy_loss.kwargs, "loss_type": loss_type}
    loss = actor.policy_loss.model_copy(update={"loss_mode": "bypass_mode", "kwargs": kwargs})
    return actor.model_copy(update={"policy_loss": loss})


def check_rollout_log_probs(batch: DataProto) -> None:
    """
    Raises:
        EngineError: there are none, or one of a response token is not finite.
    """
    what, got = "no log-probs", None
    if SAMPLED in batch:
        sampled, mask = batch.ragged(SAMPLED), batch.ragged("response_mask").values
        bad = mask & ~sampled.values.isfinite()
        if not bool(bad.any()):
            return
        what, row = "log-probs that are not finite", int(sampled.row_ids()[bad][0])
        got = f"{int(bad.sum())} of {int(mask.sum())} response tokens, the first in sample {row}"
    raise EngineError(
        f"the rollout gave {what}",
        field="algorithm.rollout_correction",
        got=got,
        expected="the log-prob of every token that the engine sampled",
        remedy="choose an engine that gives them, such as actor_rollout_ref.rollout.name=native, or no "
        "correction",
    )


def without_rejected(batch: DataProto) -> DataProto:
    """The batch as an update sees it: rejected tokens are none of the response, and no denominator counts
    them."""
    if KEPT not in batch:
        return batch
    columns = {**batch.batch, "response_mask": batch.ragged(KEPT)}
    del columns[KEPT]
    return DataProto(columns, batch.non_tensor_batch, batch.meta_info)


def count_kept(metrics: Metrics, kept: Tensor, offsets: Tensor) -> None:
    """A micro-batch's share of what `recounted` reads."""
    metrics.add_sum(_TOKENS, kept.sum())
    metrics.add_sum(_SEQUENCES, (segment_sum(kept, offsets) > 0).sum())


def recounted(metrics: Metrics, counts: Counts, mode: str) -> float:
    """See `RecountingLoss.recount`, for a loss aggregated by `mode` whose micro-batches counted what they
    kept."""
    tokens, sequences = (float(metrics.pop(name).value) for name in (_TOKENS, _SEQUENCES))
    if tokens == 0:
        return 0.0
    by_mode = {"token-mean": counts.tokens / tokens, "token-sum": 1.0}
    factor = by_mode.get(mode, counts.sequences / sequences)
    for name in ("loss", "pg_loss"):
        metrics[name] = replace(metrics[name], value=metrics[name].value * factor)
    return factor
