"""Find the cause of a difference between the log-probs of rollout and training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from tandem.watch.checks import Facts, Row
from tandem.watch.gap import AS_IT_IS, EXPERIMENT


class Cause(Enum):
    """A cause of different log-probs of rollout and training; `remedy` describes a fix."""

    RETOKENISED = "tokens were changed between the engine and training"
    STALE = "stale weights"
    RESHAPED = "samples are drawn from a different distribution than the one that is trained"
    UNREPEATABLE = "training computes different log-probs each time"
    LEAKED = "in training, samples that are packed together influence each other"
    UNADAPTED = "the rollout samples without the adapters that are trained"
    UNSCALED = "the rollout's log-probs are those of temperature 1"
    HEADLESS = "the rollout reads prompts without their first token"
    EARLY = "the rollout's log-probs are shifted one token too early"
    LATE = "the rollout's log-probs are shifted one token too late"
    LEFTOVER = "rollout and training agreed with earlier weights and no longer do"
    NUMERICS = "numerical differences between the engines"

    @property
    def remedy(self) -> str:
        return _REMEDIES[self]


_REMEDIES = {
    Cause.RETOKENISED: "pass the engine's token ids on unchanged; encoding the text again changes them",
    Cause.STALE: "send the weights to the rollout before each generation",
    Cause.RESHAPED: "sample with top_p=1, top_k=-1, min_p=0, no penalties and the temperature of training, "
    "or use an engine that returns the log-probs before these settings apply, such as rollout.name=native",
    Cause.UNREPEATABLE: "turn dropout off, or use fsdp_config.full_determinism",
    Cause.LEAKED: "train with use_remove_padding=false, or with a different attn_implementation, and report "
    "the model's architecture",
    Cause.UNADAPTED: "give the engine the merged weights (actor.weights()), not those of the base model",
    Cause.UNSCALED: "make the engine return log-probs after the temperature (vLLM: processed_logprobs)",
    Cause.HEADLESS: "pass the prompt's token ids on unchanged; the engine drops or adds a begin token",
    Cause.EARLY: "log_probs[t] must be that of token t given the tokens before it",
    Cause.LATE: "log_probs[t] must be that of token t given the tokens before it",
    Cause.LEFTOVER: "look for old state that an update leaves in the rollout: a prefix cache that is not "
    "cleared, packed copies of weights, captured graphs, adapters merged with a different scale; "
    "rollout.name=native has none of these. If the difference grows slowly, it may be rounding: use the same "
    "precision in both engines",
    Cause.NUMERICS: "use the same precision and kernels in both engines, and rollout.name=native if you use "
    "another engine. The rest is rounding, which importance weights correct (algorithm.rollout_correction)",
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
"""The number of samples that experiments use."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence in the samples of one step.

    Attributes:
        difference: mean |log p - log q| over response tokens, in nats, where p is training's probability of a
            token and q is the rollout's probability.
        raised: mean max(log q - log p, 0), the part of the difference in which the rollout's probability is
            higher.
        limit: the limit of the difference, in nats.
        version_lag: the number of optimizer steps by which the oldest weights that generated a token are
            behind the training weights.
        changed_samples: the number of samples whose tokens differ from the tokens that the engine generated.
        reshaped: whether q is known to belong to a distribution that sampling parameters reshaped.
        sampled_temperature: the temperature of sampling.
        temperature: the temperature of training.
        experiments: a dict from a known fault to the mean difference, in nats, with this fault; see
            `add_experiments`.
        agreed: whether rollout and training agreed in an earlier step.
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
    """Return the cause of a difference above its limit, or of changed tokens; None without a problem.

    Each cause has different symptoms. Changed tokens have a different fingerprint. With stale weights, tokens
    have an older weight version. A different distribution is known from the sampling parameters. If an engine
    truncates the distribution without a request, log q - log p is hardly ever negative, because q of every
    remaining token rises. Experiments distinguish the other causes. Each experiment applies a known fault in
    training, and the fault that is the cause makes the difference disappear. A difference in numerics has
    both signs, and no fault makes it disappear.
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
    """Return the fault that makes most of the difference disappear.

    At most a tenth (`_EXPLAINED`) of the difference, or a difference within the limit, may be left. The
    result is None if there is no such fault, or without experiments.
    """
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
    """Return the evidence that the metrics of a step contain.

    Args:
        metrics: the metrics of the step.
        facts: the facts of the run.
        agreed: whether rollout and training agreed in an earlier step.
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
    """Return a dict from name, without the prefix, to value for all metrics with a prefix."""
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def sentence(cause: Cause, evidence: Evidence) -> str:
    """Return a sentence with the cause, its numbers and its remedy.

    Changed tokens are reported even if the log-probs do not differ.
    """
    changed, lag = evidence.changed_samples, evidence.version_lag
    numbers = {Cause.RETOKENISED: f" in {changed:.0f} samples", Cause.STALE: f", {lag:.0f} updates behind"}
    what = f"{cause.value}{numbers.get(cause, '')}. Remedy: {cause.remedy}"
    if evidence.difference <= evidence.limit:
        return what[0].upper() + what[1:]
    return (
        f"The log-probs of rollout and training differ by {evidence.difference:.2g} nats on average (limit "
        f"{evidence.limit:.2g}): {what}"
    )


def pearson(p: float, q: float, pp: float, qq: float, pq: float) -> float | None:
    """Return Pearson's correlation, given the means of p, q, p², q² and pq; None if p or q does not vary."""
    variances = (pp - p * p) * (qq - q * q)
    return None if variances <= 0 else (pq - p * q) / math.sqrt(variances)
