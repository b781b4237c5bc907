"""The judge of a run's steps: tells what is wrong, each thing once in a run's life."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from tandem.watch.batches import CHECK
from tandem.watch.checks import Facts, Row, findings
from tandem.watch.gap import EXPERIMENT, MOMENT
from tandem.watch.integrity import broken_rules
from tandem.watch.learning import CHECKS, PROMPTS, READ, WINDOW
from tandem.watch.trust import Cause, below, diagnose, evidence_of, pearson, sentence


class Watch:
    """The memory of a run: it judges each step beside those before.

    Args:
        prompts: of a step.
        tell: tells the user what is wrong: its name, a sentence, the step.

    Attributes:
        named: the sentences of what was found, by name.
        puzzled: whether only experiments on the next step's samples can tell why rollout and training differ.
    """

    def __init__(self, prompts: int, tell: Callable[[str, str, int], None]) -> None:
        self.named: dict[str, str] = {}
        self.puzzled = False
        self._tell = tell
        self._window = max(WINDOW, -(-PROMPTS // prompts))
        self._history: dict[str, list[float]] = {name: [] for name in READ}
        self._before: Row = {}
        self._agreed = self._tried = False

    def restore(self, rows: Iterable[Row], named: Mapping[str, str]) -> None:
        """Go on where a run was left.

        Args:
            rows: metrics of the steps before.
            named: what was told then.
        """
        self.named |= named
        for row in rows:
            self._remember(row)

    def judge_learning(self, step: int, metrics: Row) -> None:
        """Judge the history of a run that has taken one more step.

        Args:
            metrics: of the step, as they are logged.
        """
        self._remember(metrics)
        self._name(findings(CHECKS, self._history, self._window), step)

    def judge_samples(self, step: int, metrics: Row, facts: Facts) -> dict[str, float]:
        """Judge the samples and the updates of a step, before it is logged.

        Args:
            metrics: of the step, with those that are for this alone.

        Returns:
            the metrics without these; with the correlation in place of the moments it is made of.
        """
        self._name(broken_rules(metrics, self._before, facts).items(), step)
        rest = {name: v for name, v in metrics.items() if not name.startswith((MOMENT, EXPERIMENT, CHECK))}
        if moments := below(metrics, MOMENT):
            correlation = pearson(**moments)
            if correlation is not None:
                rest["rollout/prob_pearson"] = correlation
            self._explain(step, metrics, facts)
        self._step_before(metrics)
        return rest

    def _explain(self, step: int, metrics: Row, facts: Facts) -> None:
        """Name the cause of a difference between rollout and training, or ask for experiments first."""
        evidence = evidence_of(metrics, facts, agreed=self._agreed)
        cause = diagnose(evidence)
        self._tried |= bool(evidence.experiments)
        self.puzzled = cause in (Cause.NUMERICS, Cause.LEFTOVER) and facts.experiments and not self._tried
        if cause is not None and not self.puzzled:
            self._name([(cause.name.lower(), sentence(cause, evidence))], step)

    def _remember(self, row: Row) -> None:
        for name in READ & row.keys():
            if math.isfinite(row[name]):
                self._history[name].append(row[name])
        self._step_before(row)

    def _step_before(self, row: Row) -> None:
        """Make this the step before the next."""
        self._before = row
        limit = row.get("rollout/log_prob_diff_limit", 0.0)
        self._agreed |= row.get("rollout/log_prob_diff_mean", math.inf) <= limit

    def _name(self, found: Iterable[tuple[str, str]], step: int) -> None:
        for name, text in found:
            if name not in self.named:
                self.named[name] = text
                self._tell(name, text, step)
