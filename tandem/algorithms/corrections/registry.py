"""Importance weights and rejection statistics by name, and a user's own by reference.

Both are declared by signature, as in `tandem.algorithms.registry`:

    @register_importance_weight("half")
    def half(old_log_probs, rollout_log_probs, *, share=0.5):
        return (share * (old_log_probs - rollout_log_probs)).exp()

Options keep their defaults. Shapes: N tokens of all sequences together, B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tandem.algorithms.registry import Option, Registry, Spec

LOG_RATIO_LIMIT = 20.0
"""Logarithms of ratios are clamped to this on both sides before they are exponentiated."""

_COLUMNS = {
    "old_log_probs": "(N) fp64, nats, of the policy before this batch's updates, computed by training",
    "rollout_log_probs": "(N) fp64, nats, of the engine that sampled",
    "response_mask": "(N) bool, tokens that the policy wrote",
    "offsets": "(B+1) int64, where each sequence starts",
}


class Observation(NamedTuple):
    """Values to be reported as one number.

    Attributes:
        values: (N) or (B).
        counted: the same shape, bool; what stands elsewhere never matters.
        reduction: "mean", "max", "min", "std", "sample_std" (unbiased) or "ess" (mean² / mean of squares).
    """

    values: Tensor
    counted: Tensor
    reduction: str


def sequence_observations(values: Tensor, counted: Tensor) -> dict[str, Observation]:
    """Report one number per sequence by its mean, deviation, maximum and minimum."""
    reductions = {"mean": "mean", "std": "sample_std", "max": "max", "min": "min"}
    return {f"seq_{name}": Observation(values, counted, how) for name, how in reductions.items()}


class _PerToken(Spec):
    """A function of log-probs that gives a number for each token."""

    known_columns: ClassVar[Mapping[str, str]] = _COLUMNS

    @property
    def by_sequence(self) -> bool:
        """True where the tokens of a sequence share one number; a user's own is taken for a token's."""
        return ":" not in self.name and not self.name.startswith("token")

    def __call__(self, columns: Mapping[str, Tensor], **options: Option) -> Tensor:
        """Calls the function with the columns it declares.

        Raises:
            ConfigError: it returned something else than a floating tensor of the tokens' shape.
        """
        result = self._call(columns, options)
        return self._tensor(result, columns["response_mask"], "a floating tensor", Tensor.is_floating_point)


class ImportanceWeightSpec(_PerToken):
    """The weight of each token, before it is bounded."""

    kind = "importance weight"
    result = "weights per token, >= 0"


class RejectionSpec(_PerToken):
    """A statistic of each token, or of its sequence at each of its tokens; those outside the bounds are
    rejected."""

    kind = "rejection statistic"
    result = "a statistic per token"


IMPORTANCE_WEIGHTS = Registry(ImportanceWeightSpec)
REJECTIONS = Registry(RejectionSpec)

register_importance_weight = IMPORTANCE_WEIGHTS.register
importance_weight = IMPORTANCE_WEIGHTS.find
register_rejection = REJECTIONS.register
rejection = REJECTIONS.find


def clamped_log_ratio(old_log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """(N): log(pi_old / pi_rollout), within LOG_RATIO_LIMIT."""
    difference: Tensor = old_log_probs - rollout_log_probs
    return torch.clamp(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
