"""The losses that workers hand to a training engine: algorithms' pure functions, put together as
the config says and normalised over the global mini-batch.

Shapes: T tokens of a micro-batch, flat; offsets (B+1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tandem.algorithms.aggregation import aggregate
from tandem.algorithms.bradley_terry import bradley_terry_loss
from tandem.algorithms.kl import kl_penalty
from tandem.algorithms.registry import PolicyLossSpec, policy_loss
from tandem.algorithms.value_loss import clipped_value_loss
from tandem.config.actor import ActorConfig
from tandem.config.critic import CriticConfig
from tandem.engines.train.base import Counts
from tandem.observability.metrics import Metrics
from tandem.workers.probes import add_rollout_gap


@dataclass(frozen=True)
class ActorLoss:
    """Policy loss - entropy_coeff · entropy + kl_coef · KL(policy, reference).

    Where the batch holds no `old_log_probs` column, the policy that wrote the batch is the one being
    trained (one update per batch), and the update's own log-probs, detached, stand for it.

    Attributes:
        spec, options: the policy loss and its numbers.
        agg_mode, norm_length: how tokens become one number.
        entropy_coeff: weight of the entropy bonus; 0 only reports the entropy.
        kl_coef: weight of the KL term; None leaves it out.
        kl_kind: estimator of the KL term.
        recomputed: whether `old_log_probs` is a column of the batch.
        compared: columns of the rollout's log-probs that the update's own are compared with; see
            `add_rollout_gap`.
    """

    spec: PolicyLossSpec
    options: dict[str, Any]
    agg_mode: str
    norm_length: float
    entropy_coeff: float
    kl_coef: float | None
    kl_kind: str
    recomputed: bool
    compared: frozenset[str] = frozenset()
    outputs: frozenset[str] = frozenset({"log_probs", "entropy"})
    columns: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        given = {"offsets", "log_probs", "entropy"}
        columns = {"response_mask", *self.spec.columns} - given
        columns |= {"ref_log_probs"} if self.kl_coef is not None else set()
        columns -= set() if self.recomputed else {"old_log_probs"}
        object.__setattr__(self, "columns", frozenset(columns | self.compared))

    @classmethod
    def from_config(cls, actor: ActorConfig, *, recomputed: bool) -> ActorLoss:
        spec = policy_loss(actor.policy_loss.loss_mode)
        shared = {
            "clip_ratio_low": actor.clip_ratio_low,
            "clip_ratio_high": actor.clip_ratio_high,
            "clip_ratio_c": actor.clip_ratio_c,
        }
        return cls(
            spec=spec,
            options=spec.select_options(shared, actor.policy_loss.kwargs),
            agg_mode=actor.loss_agg_mode,
            norm_length=actor.loss_scale_factor,
            entropy_coeff=actor.entropy_coeff,
            kl_coef=actor.kl_loss_coef if actor.use_kl_loss else None,
            kl_kind=actor.kl_loss_type,
            recomputed=recomputed,
        )

    def __call__(
        self, out: Mapping[str, Tensor], columns: Mapping[str, Tensor], offsets: Tensor, counts: Counts
    ) -> tuple[Tensor, Metrics]:
        given = {**out, **columns, "offsets": offsets}
        mask = columns["response_mask"]
        if not self.recomputed:
            given["old_log_probs"] = out["log_probs"].detach()
        losses_T, observed = self.spec(given, **self.options)
        metrics = Metrics()
        loss = policy = self._reduce(losses_T, mask, offsets, counts)
        if self.entropy_coeff != 0:
            loss = loss - self.entropy_coeff * self._reduce(out["entropy"], mask, offsets, counts)
        if self.kl_coef is not None:
            kl_T = kl_penalty(out["log_probs"], columns["ref_log_probs"], self.kl_kind)
            loss = loss + self.kl_coef * self._reduce(kl_T, mask, offsets, counts)
            metrics.add_mean("kl", _total(kl_T, mask), mask.sum())
        metrics.add_sum("pg_loss", policy)
        metrics.add_sum("loss", loss)
        metrics.add_mean("entropy", _total(out["entropy"], mask), mask.sum())
        for name, values_T in observed.items():
            metrics.add_mean(name, _total(values_T, mask), mask.sum())
        if self.compared:
            add_rollout_gap(metrics, out["log_probs"].detach(), columns, mask)
        return loss, metrics

    def _reduce(self, values_T: Tensor, mask: Tensor, offsets: Tensor, counts: Counts) -> Tensor:
        return aggregate(
            values_T,
            mask,
            offsets,
            mode=self.agg_mode,
            tokens=counts.tokens,
            sequences=counts.sequences,
            norm_length=self.norm_length,
        )


@dataclass(frozen=True)
class CriticLoss:
    """Clipped squared error of the values against the returns (PPO's value loss)."""

    cliprange_value: float
    agg_mode: str
    norm_length: float
    outputs: frozenset[str] = frozenset({"values"})
    columns: frozenset[str] = frozenset({"values", "returns", "response_mask"})

    @classmethod
    def from_config(cls, critic: CriticConfig, *, norm_length: float) -> CriticLoss:
        return cls(critic.cliprange_value, critic.loss_agg_mode, norm_length)

    def __call__(
        self, out: Mapping[str, Tensor], columns: Mapping[str, Tensor], offsets: Tensor, counts: Counts
    ) -> tuple[Tensor, Metrics]:
        mask = columns["response_mask"]
        losses_T, observed = clipped_value_loss(
            out["values"], columns["values"], columns["returns"], cliprange_value=self.cliprange_value
        )
        loss = aggregate(
            losses_T,
            mask,
            offsets,
            mode=self.agg_mode,
            tokens=counts.tokens,
            sequences=counts.sequences,
            norm_length=self.norm_length,
        )
        metrics = Metrics()
        metrics.add_sum("loss", loss)
        metrics.add_mean("new_values", _total(out["values"], mask), mask.sum())
        for name, values_T in observed.items():
            metrics.add_mean(name, _total(values_T, mask), mask.sum())
        return loss, metrics


@dataclass(frozen=True)
class NextTokenLoss:
    """Cross-entropy over the tokens of `response_mask`, token-mean over the mini-batch."""

    outputs: frozenset[str] = frozenset({"log_probs"})
    columns: frozenset[str] = frozenset({"response_mask"})

    def __call__(
        self, out: Mapping[str, Tensor], columns: Mapping[str, Tensor], offsets: Tensor, counts: Counts
    ) -> tuple[Tensor, Metrics]:
        mask = columns["response_mask"]
        total = -_total(out["log_probs"], mask)
        metrics = Metrics()
        metrics.add_mean("loss", total, mask.sum())
        return total / counts.tokens, metrics


@dataclass(frozen=True)
class PreferenceLoss:
    """Bradley-Terry loss over the pairs of sequences of a batch, mean over the mini-batch. A row of the batch
    holds a pair, the chosen sequence first.

    Attributes:
        center_coefficient: weight of (r_chosen + r_rejected)².
    """

    center_coefficient: float = 0.0
    outputs: frozenset[str] = frozenset({"scores"})
    columns: frozenset[str] = frozenset({"margin"})

    def __call__(
        self, out: Mapping[str, Tensor], columns: Mapping[str, Tensor], offsets: Tensor, counts: Counts
    ) -> tuple[Tensor, Metrics]:
        scores = out["scores"][offsets[1:] - 1]
        pairs = len(scores) // 2  # none in a ghost, which is a single sequence
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


def _total(values_T: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values_T, 0.0).sum()
