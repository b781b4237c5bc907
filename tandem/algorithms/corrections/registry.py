"""Registries of importance weights and rejection statistics, including user-defined functions.

The signature of a function declares its inputs, as in `tandem.algorithms.registry`:

    @register_importance_weight("half")
    def half(old_log_probs, rollout_log_probs, *, share=0.5):
        return (share * (old_log_probs - rollout_log_probs)).exp()

Options always have their default values here; no config key sets them.

Shapes: N is the number of tokens of all sequences together, B the number of sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tandem.algorithms.registry import Option, Registry, Spec

LOG_RATIO_LIMIT = 20.0
"""Nats. Log-ratios are clamped to [-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT] before they are exponentiated."""

_COLUMNS = {
    "old_log_probs": "(N) fp64, nats, of the policy before this batch's updates, as training computes them",
    "rollout_log_probs": "(N) fp64, nats, of the engine that sampled",
    "response_mask": "(N) bool, true at tokens that the policy wrote",
    "offsets": "(B+1) int64, index of each sequence's first token",
}


class Observation(NamedTuple):
    """A metric's values before they are reduced to one number.

    Attributes:
        values: (N) or (B).
        counted: bool, same shape as `values`; values where it is false are ignored.
        reduction: "mean", "max", "min", "std", "sample_std" (unbiased) or "ess" (mean² / mean of squares).
    """

    values: Tensor
    counted: Tensor
    reduction: str


def sequence_observations(values: Tensor, counted: Tensor) -> dict[str, Observation]:
    """Return the mean, deviation, maximum and minimum of a quantity with one value per sequence."""
    reductions = {"mean": "mean", "std": "sample_std", "max": "max", "min": "min"}
    return {f"seq_{name}": Observation(values, counted, how) for name, how in reductions.items()}


class _PerToken(Spec):
    """A function of log-probs that returns one number per token."""

    known_columns: ClassVar[Mapping[str, str]] = _COLUMNS

    @property
    def by_sequence(self) -> bool:
        """True if all tokens of a sequence share one number.

        A user-defined function counts as per token.
        """
        return ":" not in self.name and not self.name.startswith("token")

    def __call__(self, columns: Mapping[str, Tensor], **options: Option) -> Tensor:
        """Call the function with the columns that its signature names.

        Raises:
            ConfigError: the result is not a floating-point tensor of shape (N).
        """
        result = self._call(columns, options)
        return self._tensor(
            result, columns["response_mask"], "a floating-point tensor", Tensor.is_floating_point
        )


class ImportanceWeightSpec(_PerToken):
    """The spec of an importance weight: one weight per token, before bounds are applied."""

    kind = "importance weight"
    result = "weights per token, >= 0"


class RejectionSpec(_PerToken):
    """The spec of a rejection statistic, of each token or of the token's whole sequence.

    Tokens whose statistic is outside the bounds are rejected.
    """

    kind = "rejection statistic"
    result = "a statistic per token"


IMPORTANCE_WEIGHTS = Registry(ImportanceWeightSpec)
REJECTIONS = Registry(RejectionSpec)

register_importance_weight = IMPORTANCE_WEIGHTS.register
importance_weight = IMPORTANCE_WEIGHTS.find
register_rejection = REJECTIONS.register
rejection = REJECTIONS.find


def clamped_log_ratio(old_log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """Return log(pi_old / pi_rollout) (N), clamped to [-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT]."""
    difference: Tensor = old_log_probs - rollout_log_probs
    return torch.clamp(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
