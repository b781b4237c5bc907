"""The terms that the policy's loss is the sum of. A new term is a class like these.

Shapes: T tokens of a micro-batch, flat; offsets (B+1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from tandem.algorithms.kl import kl_penalty
from tandem.algorithms.registry import PolicyLossSpec
from tandem.workers.correction import WEIGHTS


class Term(Protocol):
    """A term of a loss.

    Attributes:
        outputs: what it reads of the model's outputs; see `LossFn`.
        columns: what it reads of the batch's columns besides `response_mask`.
        coefficient: its weight in the sum; with 0 it has no gradient and is only reported.
        share: the metric that its aggregated value is reported as, before the coefficient; None: it is not.
    """

    @property
    def outputs(self) -> frozenset[str]: ...
    @property
    def columns(self) -> frozenset[str]: ...
    @property
    def coefficient(self) -> float: ...
    @property
    def share(self) -> str | None: ...

    def __call__(self, given: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """
        Args:
            given: outputs and columns (T), zero outside the response, and `offsets`.

        Returns:
            the term's value of each token (T), and what is reported of it: by metric, values (T) that are
            averaged over the response tokens.
        """
        ...


@dataclass(frozen=True)
class PolicyTerm:
    """The policy loss, times the rollout correction's weights unless the loss itself reads them.

    Attributes:
        spec, options: the policy loss and its numbers.
    """

    spec: PolicyLossSpec
    options: dict[str, Any]
    coefficient: float = 1.0
    share: str | None = "pg_loss"

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"log_probs"} | {"entropy"} & set(self.spec.columns))

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(self.spec.columns) - {"offsets", "log_probs", "entropy", "response_mask"}

    def __call__(self, given: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        losses_T, observed = self.spec(given, **self.options)
        if WEIGHTS in given and WEIGHTS not in self.spec.columns:
            losses_T = losses_T * given[WEIGHTS]
        return losses_T, observed


@dataclass(frozen=True)
class EntropyTerm:
    """The entropy of the policy's distribution at each token, nats; a bonus where the coefficient is
    negative."""

    coefficient: float
    share: str | None = None
    outputs: ClassVar[frozenset[str]] = frozenset({"entropy"})
    columns: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, given: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        return given["entropy"], {"entropy": given["entropy"]}


@dataclass(frozen=True)
class SampledKLTerm:
    """The KL to the reference, nats, estimated from the tokens that were sampled.

    Attributes:
        kind: the estimator; see `kl_penalty`.
    """

    coefficient: float
    kind: str
    share: str | None = None
    outputs: ClassVar[frozenset[str]] = frozenset({"log_probs"})
    columns: ClassVar[frozenset[str]] = frozenset({"ref_log_probs"})

    def __call__(self, given: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        kl_T = kl_penalty(given["log_probs"], given["ref_log_probs"], self.kind)
        return kl_T, {"kl": kl_T}


@dataclass(frozen=True)
class ExactKLTerm:
    """The KL to the reference, nats, exact over the vocabulary: an output of the model, which holds the
    reference's head and reads its hidden states."""

    coefficient: float
    share: str | None = None
    outputs: ClassVar[frozenset[str]] = frozenset({"ref_kl"})
    columns: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, given: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        return given["ref_kl"], {"kl": given["ref_kl"]}
