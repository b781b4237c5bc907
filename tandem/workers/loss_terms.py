"""The terms that the policy's loss is the sum of. A new term is a class like these, and a line of
`configured_terms`. Of each:

- `outputs`: what it reads of the model's outputs; see `LossFn`.
- `columns`: what it reads of the batch's columns besides `response_mask`.
- `coefficient`: its weight in the sum; with 0 it has no gradient and is only reported.
- `share`: the metric that its aggregated value is reported as, before the coefficient; None: it is not.
- A call is given outputs and columns (T), zero outside the response, and `offsets`. It returns the term's
  value of each token (T), and what is reported of it: by metric, values (T) that are averaged over the
  response tokens.

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
class OutputTerm:
    """An output of the model as it is. The `entropy` of the policy's distribution at each token, nats, is a
    bonus where the coefficient is negative. `ref_kl` is the KL to the reference, nats, exact over the
    vocabulary, of a model that holds the reference's head and reads its hidden states.

    Attributes:
        output: its name.
        metric: the name that its mean is reported under.
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
    """The KL to the reference, nats, estimated from the tokens that were sampled; to several, the weighted
    sum.

    Attributes:
        kind: the estimator; see `kl_penalty`.
        references: the weight of each reference's KL, by the column of its log-probs.
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
    """The terms of the policy's loss that a config asks for. The entropy is reported without a bonus too.

    Args:
        references: see `SampledKLTerm`.

    Raises:
        ConfigError: see `configured_loss`.
    """
    policy = PolicyTerm(*configured_loss(actor))
    terms: tuple[Term, ...] = (policy, OutputTerm(ENTROPY, ENTROPY, -actor.entropy_coeff))
    if not actor.use_kl_loss:
        return terms
    if actor.kl_loss_type == FULL:
        return (*terms, OutputTerm("ref_kl", "kl", actor.kl_loss_coef))
    return (*terms, SampledKLTerm(actor.kl_loss_coef, actor.kl_loss_type, references))


def configured_loss(actor: ActorConfig) -> tuple[PolicyLossSpec, dict[str, Any]]:
    """The policy loss that a config names, and its options.

    Raises:
        ConfigError: an option that it does not take, or of another type.
    """
    spec = policy_loss(actor.policy_loss.loss_mode)
    shared = {option: attrgetter(key)(actor) for option, key in LOSS_KEYS.items()}
    given = {option: value for option, value in shared.items() if value is not None}
    return spec, spec.select_options(given, actor.policy_loss.kwargs)
