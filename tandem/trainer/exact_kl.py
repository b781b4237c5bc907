"""The controller's part of the exact KL to the reference.

The actor computes the KL from the reference's output head and hidden states; see `tandem.algorithms.kl`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engines.train.base import REFERENCE
from tandem.runtime import BatchFuture
from tandem.trainer.roles import Roles


@dataclass(frozen=True, slots=True)
class ReferenceOutputs:
    """The outputs of the references for the samples of a step.

    Attributes:
        log_probs: The log-probs of each reference; empty without a reference.
        hidden: A dict from exact KL term ("reward" or "loss") to the reference's hidden states.
    """

    log_probs: list[BatchFuture]
    hidden: dict[str, BatchFuture]

    def with_hidden(self, term: str, batch: BatchFuture) -> BatchFuture:
        """Return `batch` for the actor. If the KL term is exact, add the reference's hidden states."""
        return batch.union(self.hidden[term]) if term in self.hidden else batch


class ExactKL:
    """The KL terms of a run that are computed exactly, over the whole vocabulary.

    The reference's hidden states are large, so only the batches that go to the actor have them as a column.
    The reference's output head goes to the actor once, and again after the reference or the actor's processes
    change.

    Args:
        terms: The exact KL terms: "reward", "loss" or both. If empty, the reference returns only log-probs.
    """

    def __init__(self, terms: frozenset[str]) -> None:
        self._terms = terms
        self._head_is_current = False

    def query(self, roles: Roles, samples: BatchFuture) -> ReferenceOutputs:
        """Compute the outputs of all references for the samples."""
        if roles.reference is None:
            return ReferenceOutputs(
                [each.compute_ref_log_prob(samples) for each in roles.references.values()], {}
            )
        if self._terms and not self._head_is_current:
            roles.actor.hold_reference_head(roles.reference.reference_head())
            self._head_is_current = True
        found: BatchFuture = roles.reference.compute_ref_log_prob(samples)
        hidden = {term: found.select(REFERENCE) for term in self._terms}
        return ReferenceOutputs([found.select("ref_log_probs")], hidden)

    def forget_head(self) -> None:
        """Send the reference's head again before its next use, because the reference or actor changed."""
        self._head_is_current = False
