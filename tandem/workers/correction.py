"""The rollout correction: importance weights and rejection of tokens, as set in the config.

The equations are in `tandem.algorithms.corrections`. This module selects and applies them.

If the batch has a column of recomputed old log-probs, this column is compared with the rollout's log-probs
once, before the updates. The batch then gets the columns `rollout_is_weights` and `kept_mask`.

If old log-probs are not recomputed, the loss makes the comparison in each micro-batch. This happens in two
cases: with one update per batch, whose log-probs serve as old log-probs, and in bypass mode, which compares
the trained policy with the rollout. Then the number of kept tokens is known only after all micro-batches. The
gradient is divided by that number, so it is rescaled at the end.

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
"""The name of the column that is true at response tokens that were not rejected, ragged bool."""
WEIGHTS = "rollout_is_weights"
PREFIX = "rollout_corr/"
_TOKENS, _SEQUENCES = f"{PREFIX}kept_tokens", f"{PREFIX}kept_sequences"


class Corrected(NamedTuple):
    """The result of a rollout correction.

    Attributes:
        weights: (N) Detached weights, zero outside the mask. None if there are no importance weights.
        kept: (N) bool, the tokens of the mask that were not rejected.
    """

    weights: Tensor | None
    kept: Tensor


class Correction:
    """The rollout correction of a run: importance weights, rejection of tokens, and their metrics.

    Args:
        config: The resolved config section of the rollout correction.

    Attributes:
        weight: The function that computes importance weights before they are truncated. None if there are no
            weights.
        rejections: The statistics that reject tokens, each with its bounds. A token is kept if all its
            statistics are within their bounds.

    Raises:
        ConfigError: A function given by the user cannot be used.
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
        """Compute the importance weights and the kept tokens of a batch.

        Args:
            log_probs: (N) The training engine's log-probs, in nats.
            rollout_log_probs: (N) The rollout's log-probs, in nats.
            mask: (N) bool, true at response tokens.
            offsets: (B+1) int64, the index of each sequence's first token. The last entry is N.
            metrics: The metrics to which `rollout_corr/...` are added.
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
    """Add observations to the metrics, under `rollout_corr/`.

    Observations of micro-batches can be added one after the other.
    """
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
    """Return the new columns of a batch that the correction can compute before the updates.

    In bypass mode the only column is `old_log_probs`, which contains the rollout's log-probs. Otherwise, if
    old log-probs were recomputed, the columns are `rollout_is_weights` and `kept_mask`, if the config enables
    them.

    Args:
        correction: The correction.
        batch: The batch.
        metrics: The metrics to which `rollout_corr/...` are added.

    Raises:
        EngineError: The rollout returned no log-probs.
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


def with_bypass_loss(actor: ActorConfig, loss_type: str) -> ActorConfig:
    """Return the actor's config section with the policy loss of bypass mode."""
    kwargs = {**actor.policy_loss.kwargs, "loss_type": loss_type}
    loss = actor.policy_loss.model_copy(update={"loss_mode": "bypass_mode", "kwargs": kwargs})
    return actor.model_copy(update={"policy_loss": loss})


def check_rollout_log_probs(batch: DataProto) -> None:
    """Check that every response token has a finite log-prob of the rollout.

    Raises:
        EngineError: The batch has no rollout log-probs, or a log-prob is not finite.
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
        f"the rollout returned {what}",
        field="algorithm.rollout_correction",
        got=got,
        expected="the log-prob of every token that the engine sampled",
        remedy="use an engine that returns them, such as actor_rollout_ref.rollout.name=native, or turn off "
        "the correction",
    )


def without_rejected(batch: DataProto) -> DataProto:
    """Return the batch with rejected tokens removed from the response mask.

    Updates then ignore these tokens, also in denominators.
    """
    if KEPT not in batch:
        return batch
    columns = {**batch.batch, "response_mask": batch.ragged(KEPT)}
    del columns[KEPT]
    return DataProto(columns, batch.non_tensor_batch, batch.meta_info)


def count_kept(metrics: Metrics, kept: Tensor, offsets: Tensor) -> None:
    """Add a micro-batch's numbers of kept tokens and sequences to the metrics, for `recount_factor`."""
    metrics.add_sum(_TOKENS, kept.sum())
    metrics.add_sum(_SEQUENCES, (segment_sum(kept, offsets) > 0).sum())


def recount_factor(metrics: Metrics, counts: Counts, mode: str) -> float:
    """Return the factor that rescales the gradient of a loss after all micro-batches are counted.

    `mode` is the aggregation mode of the loss; see `RecountingLoss.recount`.
    """
    tokens, sequences = (float(metrics.pop(name).value) for name in (_TOKENS, _SEQUENCES))
    if tokens == 0:
        return 0.0
    by_mode = {"token-mean": counts.tokens / tokens, "token-sum": 1.0}
    factor = by_mode.get(mode, counts.sequences / sequences)
    for name in ("loss", "pg_loss"):
        metrics[name] = replace(metrics[name], value=metrics[name].value * factor)
    return factor
