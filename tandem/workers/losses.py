"""The losses that workers pass to a training engine.

The losses combine the functions in `tandem.algorithms`, as set in the config. They are normalized over the
global mini-batch.

Shapes: T tokens of a micro-batch, flat; offsets (B+1).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.algorithms.aggregation import aggregate
from tandem.algorithms.bradley_terry import bradley_terry_loss
from tandem.algorithms.value_loss import clipped_value_loss
from tandem.config.actor import ONE_REFERENCE, ActorConfig
from tandem.config.rollout_correction import RolloutCorrectionConfig
from tandem.engines.train.base import Counts
from tandem.observability.metrics import Metrics
from tandem.watch.gap import SAMPLED, add_rollout_gap
from tandem.workers.correction import WEIGHTS, Correction, count_kept, recount_factor, with_bypass_loss
from tandem.workers.loss_terms import ENTROPY, OutputTerm, Term, configured_terms

Named = Mapping[str, Tensor]
TOKEN_SHARE = "trust/token_share"
"""The metric that compares the tokens of all micro-batches with the divisor of the loss.

Its value is the number of tokens of all micro-batches, divided by the number of tokens that the loss was
divided by. Any value except 1 means that the scale of the loss is wrong.
"""


@dataclass(frozen=True)
class ActorLoss:
    """The policy's loss: Σ coefficient · aggregated term.

    The terms are the policy loss, the entropy bonus and the KL to the reference, in this order.

    If the batch has no `old_log_probs` column, the trained policy is the policy that wrote the batch (one
    update per batch). Then the detached log-probs of the update itself are used as old log-probs.

    Attributes:
        terms: See `Term`.
        agg_mode: The mode in which token values are aggregated into one number.
        norm_length: The length that some aggregations divide by.
        recomputed: Whether `old_log_probs` is a column of the batch.
        compared: The columns of rollout log-probs that are compared with the update's log-probs; see
            `add_rollout_gap`.
        weighted: Whether the batch has a column of importance weights.
        correction: The rollout correction, if the loss applies one; see `tandem.workers.correction`.
    """

    terms: tuple[Term, ...]
    agg_mode: str
    norm_length: float
    recomputed: bool
    compared: frozenset[str] = frozenset()
    weighted: bool = False
    correction: Correction | None = None

    @property
    def outputs(self) -> frozenset[str]:
        """The model outputs that the loss reads; see `LossFn`."""
        return frozenset({"log_probs"}.union(*(term.outputs for term in self.terms)))

    @property
    def columns(self) -> frozenset[str]:
        """The batch columns that the loss reads; see `LossFn`."""
        columns = {"response_mask"}.union(*(term.columns for term in self.terms)) - {WEIGHTS}
        columns -= set() if self.recomputed else {"old_log_probs"}
        columns |= {SAMPLED} if self.correction is not None else set()
        return frozenset(columns | ({WEIGHTS} if self.weighted else set()) | self.compared)

    @classmethod
    def from_config(
        cls,
        actor: ActorConfig,
        *,
        recomputed: bool,
        correction: RolloutCorrectionConfig | None = None,
        references: Mapping[str, float] = ONE_REFERENCE,
    ) -> ActorLoss:
        """Create the loss from the config.

        Args:
            actor: The actor's section.
            recomputed: Whether old log-probs are recomputed before the updates.
            correction: The config section of the rollout correction. None means no correction.
            references: See `SampledKLTerm`.
        """
        correction = correction or RolloutCorrectionConfig()
        bypasses = correction.bypass_mode
        actor = with_bypass_loss(actor, correction.loss_type) if bypasses else actor
        here = bypasses or (correction.corrects and not recomputed)
        return cls(
            terms=configured_terms(actor, references),
            agg_mode=actor.aggregation,
            norm_length=actor.loss_scale_factor,
            recomputed=recomputed or bypasses,
            weighted=correction.rollout_is is not None and recomputed,
            correction=Correction(correction) if here else None,
        )

    def with_entropy_coeff(self, coefficient: float) -> ActorLoss:
        """Return the same loss with another coefficient of the entropy bonus."""
        terms = tuple(
            replace(term, coefficient=-coefficient)
            if isinstance(term, OutputTerm) and term.output == ENTROPY
            else term
            for term in self.terms
        )
        return replace(self, terms=terms)

    def __call__(self, out: Named, columns: Named, offsets: Tensor, counts: Counts) -> tuple[Tensor, Metrics]:
        metrics = Metrics()
        given = {**out, **columns, "offsets": offsets}
        metrics.add_sum(TOKEN_SHARE, columns["response_mask"].sum().double() / max(counts.tokens, 1))
        if not self.recomputed:
            given["old_log_probs"] = out["log_probs"].detach()
        self._correct(given, metrics)
        mask = given["response_mask"]
        for name in given.keys() - {"offsets"}:
            if given[name].is_floating_point():  # NaN outside the mask must not reach loss and gradient
                given[name] = torch.where(mask, given[name], 0)
        shares = []
        for term in self.terms:
            values_T, observed = term(given)
            if term.coefficient != 0:
                share = _aggregated(self, values_T, mask, offsets, counts)
                shares.append(term.coefficient * share)
                if term.share is not None:
                    metrics.add_sum(term.share, share)
            _add_means(metrics, observed, mask)
        loss = functools.reduce(torch.add, shares)
        metrics.add_sum("loss", loss)
        if self.compared:
            add_rollout_gap(metrics, out["log_probs"].detach(), columns, columns["response_mask"])
        return loss, metrics

    def _correct(self, given: dict[str, Tensor], metrics: Metrics) -> None:
        """Apply the rollout correction, if there is one: add weights, and mask out rejected tokens."""
        if self.correction is not None:
            mask, offsets = given["response_mask"], given["offsets"]
            found = self.correction(given["log_probs"].detach(), given[SAMPLED], mask, offsets, metrics)
            given["response_mask"] = found.kept
            if found.weights is not None:
                given[WEIGHTS] = found.weights
            if self.rejects:
                count_kept(metrics, found.kept, offsets)
        if any(WEIGHTS in term.columns for term in self.terms):
            given.setdefault(WEIGHTS, torch.ones_like(given["log_probs"]))

    def recount(self, metrics: Metrics, counts: Counts) -> float:
        """Return the factor that rescales the gradient; see `RecountingLoss`."""
        return recount_factor(metrics, counts, self.agg_mode) if self.rejects else 1.0

    @property
    def rejects(self) -> bool:
        """Whether the loss rejects tokens."""
        return self.correction is not None and bool(self.correction.rejections)


@dataclass(frozen=True)
class CriticLoss:
    """The loss of the critic: the clipped squared error of values against returns (PPO's value loss)."""

    cliprange_value: float
    agg_mode: str
    norm_length: float
    outputs: frozenset[str] = frozenset({"values"})
    columns: frozenset[str] = frozenset({"values", "returns", "response_mask"})

    def __call__(self, out: Named, columns: Named, offsets: Tensor, counts: Counts) -> tuple[Tensor, Metrics]:
        mask = columns["response_mask"]
        losses_T, observed = clipped_value_loss(
            out["values"], columns["values"], columns["returns"], cliprange_value=self.cliprange_value
        )
        loss = _aggregated(self, losses_T, mask, offsets, counts)
        metrics = Metrics()
        metrics.add_sum("loss", loss)
        _add_means(metrics, {"new_values": out["values"], **observed}, mask)
        return loss, metrics


@dataclass(frozen=True)
class NextTokenLoss:
    """The cross-entropy over the tokens of `response_mask`, averaged over the tokens of the mini-batch."""

    outputs: frozenset[str] = frozenset({"log_probs"})
    columns: frozenset[str] = frozenset({"response_mask"})

    def __call__(self, out: Named, columns: Named, offsets: Tensor, counts: Counts) -> tuple[Tensor, Metrics]:
        mask = columns["response_mask"]
        total = -_total(out["log_probs"], mask)
        metrics = Metrics()
        metrics.add_mean("loss", total, mask.sum())
        return total / counts.tokens, metrics


@dataclass(frozen=True)
class PreferenceLoss:
    """The Bradley-Terry loss over the pairs of sequences of a batch, averaged over the mini-batch.

    Each row of the batch is a pair of sequences: first the chosen sequence, then the rejected one.

    Attributes:
        center_coefficient: The coefficient of the additional term (r_chosen + r_rejected)².
    """

    center_coefficient: float = 0.0
    outputs: frozenset[str] = frozenset({"scores"})
    columns: frozenset[str] = frozenset({"margin"})

    def __call__(self, out: Named, columns: Named, offsets: Tensor, counts: Counts) -> tuple[Tensor, Metrics]:
        scores = out["scores"][offsets[1:] - 1]
        pairs = len(scores) // 2  # 0 for the placeholder batch of a rank without data
        chosen_P, rejected_P = scores[: 2 * pairs].view(pairs, 2).unbind(1)
        margin_P = columns["margin"][:pairs].to(scores.dtype)
        losses_P = bradley_terry_loss(
            chosen_P, rejected_P, margin_P, center_coefficient=self.center_coefficient
        )
        metrics = Metrics()
        observed = {
            "loss": losses_P,
            "accuracy": (chosen_P > rejected_P).to(scores.dtype),
            "margin": chosen_P - rejected_P,
            "reward_chosen": chosen_P,
            "reward_rejected": rejected_P,
        }
        for name, values_P in observed.items():
            metrics.add_mean(name, values_P.sum(), pairs)
        return losses_P.sum() / counts.sequences, metrics


def _aggregated(
    loss: ActorLoss | CriticLoss, values_T: Tensor, mask: Tensor, offsets: Tensor, counts: Counts
) -> Tensor:
    """Aggregate the values of the tokens into one number, in the loss's aggregation mode."""
    return aggregate(
        values_T,
        mask,
        offsets,
        mode=loss.agg_mode,
        tokens=counts.tokens,
        sequences=counts.sequences,
        norm_length=loss.norm_length,
    )


def _add_means(metrics: Metrics, observed: Named, mask: Tensor) -> None:
    for name, values_T in observed.items():
        metrics.add_mean(name, _total(values_T, mask), mask.sum())


def _total(values_T: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values_T, 0.0).sum()
