"""Trust in the samples: the difference between rollout and training, and its cause."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tandem.protocol import SamplingParams
from tandem.workers.probes import MOMENT


class Cause(Enum):
    """Why the log-probs of rollout and training differ, and what to do about it."""

    RETOKENISED = "tokens were changed between the engine and training"
    STALE = "stale weights"
    RESHAPED = "the distribution sampled from is not the one trained on"
    NUMERICS = "the engines' numerics"

    @property
    def remedy(self) -> str:
        return _REMEDIES[self]


_REMEDIES = {
    Cause.RETOKENISED: "pass the engine's token ids on as they are; text that is encoded again gives others",
    Cause.STALE: "bring the weights to the rollout before each generation",
    Cause.RESHAPED: "sample with top_p=1, top_k=-1, min_p=0, no penalties and the temperature of training, "
    "or with an engine that gives the log-probs before those, such as rollout.name=native",
    Cause.NUMERICS: "use rollout.name=native, or the same precision and kernels in both engines; or correct "
    "for it by importance weights (algorithm.rollout_correction)",
}
_ONE_SIDED = 0.95


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
    """

    difference: float
    raised: float
    limit: float
    version_lag: float
    changed_samples: float
    reshaped: bool
    sampled_temperature: float
    temperature: float


def diagnose(evidence: Evidence) -> Cause | None:
    """The cause of a difference over its limit, or of changed tokens; None where there is neither.

    Told apart by what each leaves behind: changed tokens by their fingerprint, stale weights by the version
    written beside each token, another distribution by the sampling parameters, or, where an engine cuts
    tokens that nobody asked it to, by the sign: every other token's q rises. A difference of numerics has
    both signs.
    """
    if evidence.changed_samples > 0:
        return Cause.RETOKENISED
    if evidence.difference <= evidence.limit:
        return None
    if evidence.version_lag > 0:
        return Cause.STALE
    cut = evidence.raised >= _ONE_SIDED * evidence.difference
    if cut or evidence.reshaped or evidence.sampled_temperature != evidence.temperature:
        return Cause.RESHAPED
    return Cause.NUMERICS


class TrustProbe:
    """Reads each step's metrics, and names each cause once.

    Args:
        temperature: of training.
        say: to the user and the run's log.
    """

    def __init__(self, temperature: float, say: Callable[[str], None]) -> None:
        self.named: dict[Cause, str] = {}
        self._temperature = temperature
        self._say = say

    def read(self, metrics: dict[str, float], sampling: SamplingParams) -> dict[str, float]:
        """The metrics with the correlation in place of the moments it is made of.

        Args:
            metrics: of a step.
            sampling: how its samples were drawn.
        """
        moments = {name: value for name, value in metrics.items() if name.startswith(MOMENT)}
        rest = {name: value for name, value in metrics.items() if name not in moments}
        if moments:
            correlation = pearson(*(moments[f"{MOMENT}{part}"] for part in ("p", "q", "pp", "qq", "pq")))
            if correlation is not None:
                rest["rollout/prob_pearson"] = correlation
            self._name(rest, sampling)
        return rest

    def _name(self, metrics: dict[str, float], sampling: SamplingParams) -> None:
        evidence = Evidence(
            difference=metrics["rollout/log_prob_diff_mean"],
            raised=metrics["rollout/log_prob_diff_raised"],
            limit=metrics["rollout/log_prob_diff_limit"],
            version_lag=metrics.get("rollout/version_lag", 0.0),
            changed_samples=metrics.get("rollout/changed_samples", 0.0),
            reshaped=metrics.get("rollout/untruncated_missing", float(sampling.reshapes)) > 0,
            sampled_temperature=sampling.temperature,
            temperature=self._temperature,
        )
        cause = diagnose(evidence)
        if cause is not None and cause not in self.named:
            self.named[cause] = sentence(cause, evidence)
            self._say(self.named[cause])


def sentence(cause: Cause, evidence: Evidence) -> str:
    """The cause, its numbers and its remedy. Changed tokens are one whether or not the log-probs show it."""
    changed, lag = evidence.changed_samples, evidence.version_lag
    numbers = {Cause.RETOKENISED: f" in {changed:.0f} samples", Cause.STALE: f", {lag:.0f} updates behind"}
    what = f"{cause.value}{numbers.get(cause, '')}. Remedy: {cause.remedy}."
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
