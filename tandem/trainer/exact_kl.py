"""The exact KL to the reference on the controller: whether the actor holds the reference's output head, and
where the reference's hidden states go. The actor computes the KL of both; see `tandem.algorithms.kl`."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engines.train.base import REFERENCE
from tandem.runtime import BatchFuture
from tandem.trainer.roles import Roles


@dataclass(frozen=True, slots=True)
class Referred:
    """The reference's answer to the samples of a step.

    Attributes:
        log_probs: those of each reference; none without one.
        hidden: by term, "reward" or "loss", the reference's hidden states for it if it is exact.
    """

    log_probs: list[BatchFuture]
    hidden: dict[str, BatchFuture]

    def added_for(self, term: str, batch: BatchFuture) -> BatchFuture:
        """The batch as the actor needs it for a KL term: with the hidden states if the term is exact."""
        return batch.union(self.hidden[term]) if term in self.hidden else batch


class ExactKL:
    """The KL terms of a run that are exact over the vocabulary.

    The reference's hidden states are large: they are columns of the batches that go to the actor, and of no
    other. Its output head goes to the actor once, and again after the reference or the actor's processes
    changed.

    Args:
        terms: of "reward" and "loss", those that are exact; none: the reference gives log-probs alone.
    """

    def __init__(self, terms: frozenset[str]) -> None:
        self._terms = terms
        self._head_is_current = False

    def refer(self, roles: Roles, samples: BatchFuture) -> Referred:
        """Asks the references, if there are any."""
        if roles.reference is None:
            return Referred([each.compute_ref_log_prob(samples) for each in roles.references.values()], {})
        if self._terms and not self._head_is_current:
            roles.actor.hold_reference_head(roles.reference.reference_head())
            self._head_is_current = True
        found: BatchFuture = roles.reference.compute_ref_log_prob(samples)
        hidden = {term: found.select(REFERENCE) for term in self._terms}
        return Referred([found.select("ref_log_probs")], hidden)

    def forget_head(self) -> None:
        """The head that the actor holds is no longer the reference's, or another actor is to hold it."""
        self._head_is_current = False
