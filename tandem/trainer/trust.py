"""Trust in the samples: the difference between rollout and training, and its cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from tandem.protocol import SamplingParams
from tandem.trainer.integrity import Facts, broken_rules
from tandem.workers.experiments import AS_IT_IS, EXPERIMENT, experiments_of
from tandem.workers.integrity import CHECK
from tandem.workers.probes import MOMENT


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


@dataclass
class TrustProbe:
    """Reads each step's metrics, and names each cause once.

    Attributes:
        temperature: of training.
        warn: tells the user a cause: its name, a sentence, the step.
        facts: of the run, by which rules are chosen; None: only rollout and training are compared.
        experiments: whether the actor can make them.
        named: the causes that were named, with their sentences.
        before: the metrics of the step before; empty at a run's first.
        puzzled: whether only experiments on the next step's samples can tell the cause.
    """

    temperature: float
    warn: Callable[[str, str, int], None]
    facts: Facts | None = None
    experiments: bool = False
    named: dict[Cause | str, str] = field(default_factory=dict, init=False)
    before: Mapping[str, float] = field(default_factory=dict, init=False)
    puzzled: bool = field(default=False, init=False)
    _agreed: bool = field(default=False, init=False)
    _tried: bool = field(default=False, init=False)

    def read(self, metrics: dict[str, float], sampling: SamplingParams, step: int = 0) -> dict[str, float]:
        """The metrics with the correlation in place of the moments it is made of.

        Args:
            metrics: of a step.
            sampling: how its samples were drawn.
            step: its number.
        """
        moments = {name: value for name, value in metrics.items() if name.startswith(MOMENT)}
        private = (MOMENT, EXPERIMENT, CHECK)
        rest = {name: value for name, value in metrics.items() if not name.startswith(private)}
        if self.facts is not None:
            for name, sentence in broken_rules(metrics, self.before, self.facts).items():
                self._tell(name, sentence, step)
            self.before = metrics
        if moments:
            correlation = pearson(*(moments[f"{MOMENT}{part}"] for part in ("p", "q", "pp", "qq", "pq")))
            if correlation is not None:
                rest["rollout/prob_pearson"] = correlation
            self._name(metrics, sampling, step)
        return rest

    def _name(self, metrics: dict[str, float], sampling: SamplingParams, step: int) -> None:
        experiments = experiments_of(metrics)
        evidence = Evidence(
            difference=metrics["rollout/log_prob_diff_mean"],
            raised=metrics["rollout/log_prob_diff_raised"],
            limit=metrics["rollout/log_prob_diff_limit"],
            version_lag=metrics.get("rollout/version_lag", 0.0),
            changed_samples=metrics.get("rollout/changed_samples", 0.0),
            reshaped=metrics.get("rollout/untruncated_missing", float(sampling.reshapes)) > 0,
            sampled_temperature=sampling.temperature,
            temperature=self.temperature,
            experiments=experiments,
            agreed=self._agreed,
        )
        cause = diagnose(evidence)
        self._agreed |= evidence.difference <= evidence.limit
        self._tried |= bool(experiments)
        self.puzzled = cause in (Cause.NUMERICS, Cause.LEFTOVER) and self.experiments and not self._tried
        if cause is not None and not self.puzzled:
            self._tell(cause, sentence(cause, evidence), step)

    def _tell(self, cause: Cause | str, text: str, step: int) -> None:
        if cause not in self.named:
            self.named[cause] = text
            self.warn(cause.name.lower() if isinstance(cause, Cause) else cause, text, step)


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
