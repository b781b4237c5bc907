"""The terms of the policy's loss. The loss is the weighted sum of the terms.

To add a term, write a class like the classes here, and add it in `configured_terms`. Each term has:

- `outputs`: the model outputs that the term reads; see `LossFn`.
- `columns`: the batch columns that the term reads, besides `response_mask`.
- `coefficient`: the term's weight in the sum. A term with weight 0 has no gradient and is only reported.
- `share`: the name of the metric for the aggregated value of the term, without the coefficient. None means no
  metric.
- `__call__`, which receives outputs and columns (T), which are zero outside the response, and `offsets`. It
  returns the term's value for each token (T), and a dict from metric to values (T). The metrics report the
  means of these values over the response tokens.

Shapes: T tokens of a micro-batch, flat; offsets (B+1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar

from torch import Tensor

from tandem.algorithms.kl import FULL, kl_penalty, weighted_kl
from tandem.algorithms.registry import PolicyLossSpec, policy_loss
from tandem.config.actor import ONE_REFERENCE, ActorConfig, reference_name
from tandem.config.tables import LOSS_KEYS
from tandem.workers.correction import WEIGHTS

ENTROPY = "entropy"


@dataclass(frozen=True)
class PolicyTerm:
    """The term for the policy loss.

    The loss is multiplied by the importance weights of the rollout correction, unless the loss function reads
    these weights itself.

    Attributes:
        spec: The policy loss.
        options: The options of the policy loss.
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
class OutputTerm:
    """A term that is an unchanged output of the model: the entropy or the exact KL.

    `entropy` is the entropy of the policy's distribution at each token, in nats. With a negative coefficient,
    the entropy is a bonus. `ref_kl` is the exact KL to the reference over the vocabulary, in nats. For
    `ref_kl`, the model holds the reference's output head and reads the reference's hidden states.

    Attributes:
        output: The name of the output.
        metric: The name of the metric for its mean.
    """

    output: str
    metric: str
    coefficient: float
    share: str | None = None
    columns: ClassVar[frozenset[str]] = frozenset()

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({self.output})

    def __call__(self, given: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        return given[self.output], {self.metric: given[self.output]}


@dataclass(frozen=True)
class SampledKLTerm:
    """The term for the KL to the reference in nats, estimated from the sampled tokens.

    With several references, the value is the weighted sum of the KLs to all references.

    Attributes:
        kind: The name of the KL estimator; see `kl_penalty`.
        references: A dict from the column of a reference's log-probs to the weight of this reference's KL.
    """

    coefficient: float
    kind: str
    references: Mapping[str, float] = field(default_factory=lambda: ONE_REFERENCE)
    share: str | None = None
    outputs: ClassVar[frozenset[str]] = frozenset({"log_probs"})

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(self.references)

    def __call__(self, given: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        log_probs_T, refs = given["log_probs"], {name: given[name] for name in self.references}
        kl_T = weighted_kl(log_probs_T, list(refs.values()), list(self.references.values()), self.kind)
        each = {
            f"actor/kl/{reference_name(name)}": kl_penalty(log_probs_T.detach(), ref_T, self.kind)
            for name, ref_T in refs.items()
            if len(refs) > 1
        }
        return kl_T, {"kl": kl_T, **each}


Term = PolicyTerm | OutputTerm | SampledKLTerm


def configured_terms(actor: ActorConfig, references: Mapping[str, float] = ONE_REFERENCE) -> tuple[Term, ...]:
    """Return the terms of the policy's loss, as set in the config.

    The entropy is reported even if there is no bonus.

    Args:
        actor: The actor's section.
        references: See `SampledKLTerm`.

    Raises:
        ConfigError: See `configured_loss`.
    """
    policy = PolicyTerm(*configured_loss(actor))
    terms: tuple[Term, ...] = (policy, OutputTerm(ENTROPY, ENTROPY, -actor.entropy_coeff))
    if not actor.use_kl_loss:
        return terms
    if actor.kl_loss_type == FULL:
        return (*terms, OutputTerm("ref_kl", "kl", actor.kl_loss_coef))
    return (*terms, SampledKLTerm(actor.kl_loss_coef, actor.kl_loss_type, references))


def configured_loss(actor: ActorConfig) -> tuple[PolicyLossSpec, dict[str, Any]]:
    """Return the policy loss that the config names, and a dict with the options of this loss.

    Raises:
        ConfigError: The loss does not accept an option, or an option has the wrong type.
    """
    spec = policy_loss(actor.policy_loss.loss_mode)
    shared = {option: attrgetter(key)(actor) for option, key in LOSS_KEYS.items()}
    given = {option: value for option, value in shared.items() if value is not None}
    return spec, spec.select_options(given, actor.policy_loss.kwargs)
