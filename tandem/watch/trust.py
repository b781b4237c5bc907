"""Trust in the samples: the difference between rollout and training, and its cause."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from tandem.watch.checks import Facts, Row
from tandem.watch.gap import AS_IT_IS, EXPERIMENT


class Cause(Enum):
    """Why the log-probs of rollout and training differ, and what to do about it."""

    RETOKENISED = "tokens were changed between the engine and training"
    STALE = "stale weights"
    RESHAPED = "the distribution sampled from is not the one trained on"
    UNREPEATABLE = "training computes other log-probs each time it is asked"
    LEAKED = "in training, samples that are packed together change each other"
    UNADAPTED = "the rollout samples without the adapters that are trained"
    UNSCALED = "the rollout's log-probs are those of temperature 1"
    HEADLESS = "the rollout reads prompts without their first token"
    EARLY = "the rollout's log-probs stand one token too early"
    LATE = "the rollout's log-probs stand one token too late"
    LEFTOVER = "it agreed with earlier weights and no longer does"
    NUMERICS = "the engines' numerics"

    @property
    def remedy(self) -> str:
        return _REMEDIES[self]


_REMEDIES = {
    Cause.RETOKENISED: "pass the engine's token ids on as they are; text that is encoded again gives others",
    Cause.STALE: "bring the weights to the rollout before each generation",
    Cause.RESHAPED: "sample with top_p=1, top_k=-1, min_p=0, no penalties and the temperature of training, "
    "or with an engine that gives the log-probs before those, such as rollout.name=native",
    Cause.UNREPEATABLE: "switch dropout off, or use fsdp_config.full_determinism",
    Cause.LEAKED: "train with use_remove_padding=false, or with another attn_implementation, and report the "
    "model's architecture",
    Cause.UNADAPTED: "give the engine the merged weights (actor.weights()), not those of the base",
    Cause.UNSCALED: "let the engine return log-probs after the temperature (vLLM: processed_logprobs)",
    Cause.HEADLESS: "pass the prompt's token ids on as they are; the engine drops or adds a begin token",
    Cause.EARLY: "log_probs[t] is that of token t given the tokens before it",
    Cause.LATE: "log_probs[t] is that of token t given the tokens before it",
    Cause.LEFTOVER: "look for what an update leaves behind in the rollout: a prefix cache that is not "
    "emptied, packed copies of weights, captured graphs, adapters merged with another scale; "
    "rollout.name=native has none of these. If it grows slowly it may be rounding: use the same precision "
    "in both engines",
    Cause.NUMERICS: "use the same precision and kernels in both engines, and rollout.name=native where it is "
    "another; what then remains is rounding, which importance weights correct (algorithm.rollout_correction)",
}
_ONE_SIDED = 0.95
_BY_EXPERIMENT = {
    "alone": Cause.LEAKED,
    "without_adapters": Cause.UNADAPTED,
    "unscaled": Cause.UNSCALED,
    "headless": Cause.HEADLESS,
    "early": Cause.EARLY,
    "late": Cause.LATE,
}
_EXPLAINED = 0.1
EXPLAINED_SAMPLES = 32
"""Samples that experiments are made with."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence of one step's samples.

    Attributes:
        difference: mean |log p - log q| over response tokens, nats; p is training's probability of a token, q
            the rollout's.
        raised: mean max(log q - log p, 0), the part of it in which the rollout is above.
        limit: of the difference, nats.
        version_lag: optimizer steps by which the oldest weights that wrote a token are behind training's.
        changed_samples: samples whose tokens are not those that the engine wrote.
        reshaped: whether q is known to be of a distribution that sampling parameters reshaped.
        sampled_temperature, temperature: of sampling and of training.
        experiments: mean differences, nats, under known faults, by name; see `add_experiments`.
        agreed: whether rollout and training agreed at an earlier step.
    """

    difference: float
    raised: float
    limit: float
    version_lag: float
    changed_samples: float
    reshaped: bool
    sampled_temperature: float
    temperature: float
    experiments: Mapping[str, float] = field(default_factory=dict)
    agreed: bool = False


def diagnose(evidence: Evidence) -> Cause | None:
    """The cause of a difference over its limit, or of changed tokens; None where there is neither.

    Told apart by what each leaves behind: changed tokens by their fingerprint, stale weights by the version
    written beside each token, another distribution by the sampling parameters, or, where an engine cuts
    tokens that nobody asked it to, by the sign: every other token's q rises. What is left is told by
    experiments: the fault under which the difference vanishes. A difference of numerics has both signs, and
    no fault makes it vanish.
    """
    if evidence.changed_samples > 0:
        return Cause.RETOKENISED
    if evidence.difference <= evidence.limit:
        return None
    if evidence.version_lag > 0:
        return Cause.STALE
    found = _by_experiment(evidence)
    if found is not None:
        return found
    cut = evidence.raised >= _ONE_SIDED * evidence.difference
    if cut or evidence.reshaped or evidence.sampled_temperature != evidence.temperature:
        return Cause.RESHAPED
    return Cause.LEFTOVER if evidence.agreed else Cause.NUMERICS


def _by_experiment(evidence: Evidence) -> Cause | None:
    """The fault under which most of the difference vanishes: a tenth (`_EXPLAINED`) is left, or what is
    within the limit. None where none does, or none was tried."""
    gaps, limit = evidence.experiments, evidence.limit
    if gaps.get("again", 0.0) > limit:
        return Cause.UNREPEATABLE
    tried = {name: gaps[name] for name in _BY_EXPERIMENT if name in gaps}
    least = min(tried, key=tried.__getitem__, default=None)
    if (
        least is None
        or tried[least] > max(limit, _EXPLAINED * gaps[AS_IT_IS])
        or tried[least] >= gaps[AS_IT_IS]
    ):
        return None
    return _BY_EXPERIMENT[least]


def evidence_of(metrics: Row, facts: Facts, *, agreed: bool) -> Evidence:
    """The evidence that the metrics of a step hold.

    Args:
        agreed: whether rollout and training agreed at an earlier step.
    """
    return Evidence(
        difference=metrics["rollout/log_prob_diff_mean"],
        raised=metrics["rollout/log_prob_diff_raised"],
        limit=metrics["rollout/log_prob_diff_limit"],
        version_lag=metrics.get("rollout/version_lag", 0.0),
        changed_samples=metrics.get("rollout/changed_samples", 0.0),
        reshaped=metrics.get("rollout/untruncated_missing", float(facts.sampling.reshapes)) > 0,
        sampled_temperature=facts.sampling.temperature,
        temperature=facts.temperature,
        experiments=below(metrics, EXPERIMENT),
        agreed=agreed,
    )


def below(metrics: Row, prefix: str) -> dict[str, float]:
    """The metrics whose names begin with a prefix, by what follows it."""
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def sentence(cause: Cause, evidence: Evidence) -> str:
    """The cause, its numbers and its remedy. Changed tokens are one whether or not the log-probs show it."""
    changed, lag = evidence.changed_samples, evidence.version_lag
    numbers = {Cause.RETOKENISED: f" in {changed:.0f} samples", Cause.STALE: f", {lag:.0f} updates behind"}
    what = f"{cause.value}{numbers.get(cause, '')}. Remedy: {cause.remedy}"
    if evidence.difference <= evidence.limit:
        return what[0].upper() + what[1:]
    return (
        f"The rollout's log-probs differ from training's by {evidence.difference:.2g} nats on average (limit "
        f"{evidence.limit:.2g}): {what}"
    )


def pearson(p: float, q: float, pp: float, qq: float, pq: float) -> float | None:
    """Pearson's correlation from the means of p, q, p², q² and pq; None where one of them does not vary."""
    variances = (pp - p * p) * (qq - q * q)
    return None if variances <= 0 else (pq - p * q) / math.sqrt(variances)
