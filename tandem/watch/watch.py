"""`Watch` checks the steps of a run and reports each problem once."""

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
    """Checks each step of a run. It stores the metrics of earlier steps for comparison.

    Args:
        prompts: prompts per step.
        tell: reports a problem to the user. Its arguments are the problem's name, a sentence, and the step.

    Attributes:
        named: a dict from the name of each problem so far to its sentence.
        needs_experiments: whether experiments with the samples of the next step are needed to find out why
            rollout and training differ.
    """

    def __init__(self, prompts: int, tell: Callable[[str, str, int], None]) -> None:
        self.named: dict[str, str] = {}
        self.needs_experiments = False
        self._tell = tell
        self._window = max(WINDOW, -(-PROMPTS // prompts))
        self._history: dict[str, list[float]] = {name: [] for name in READ}
        self._before: Row = {}
        self._agreed = self._tried = False

    def restore(self, rows: Iterable[Row], named: Mapping[str, str]) -> None:
        """Restore the state of an earlier run from its metrics and problems.

        Args:
            rows: the metrics of the earlier steps.
            named: the problems that were already reported.
        """
        self.named |= named
        for row in rows:
            self._remember(row)

    def check_learning(self, step: int, metrics: Row) -> None:
        """Check the history of a run after one more step.

        Args:
            step: the number of the step.
            metrics: the metrics of the step, as they are logged.
        """
        self._remember(metrics)
        self._name(findings(CHECKS, self._history, self._window), step)

    def check_samples(self, step: int, metrics: Row, facts: Facts) -> dict[str, float]:
        """Check the samples and the updates of a step, before it is logged.

        Args:
            step: the number of the step.
            metrics: the metrics of the step, including internal metrics that only this check reads.
            facts: the facts of the run.

        Returns:
            the metrics without internal metrics. The correlation replaces the moments that it is computed
            from.
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
        """Report the cause of a difference between rollout and training, or request experiments first."""
        evidence = evidence_of(metrics, facts, agreed=self._agreed)
        cause = diagnose(evidence)
        self._tried |= bool(evidence.experiments)
        self.needs_experiments = (
            cause in (Cause.NUMERICS, Cause.LEFTOVER) and facts.experiments and not self._tried
        )
        if cause is not None and not self.needs_experiments:
            self._name([(cause.name.lower(), sentence(cause, evidence))], step)

    def _remember(self, row: Row) -> None:
        for name in READ & row.keys():
            if math.isfinite(row[name]):
                self._history[name].append(row[name])
        self._step_before(row)

    def _step_before(self, row: Row) -> None:
        """Store this step's metrics as the previous step for the next check."""
        self._before = row
        limit = row.get("rollout/log_prob_diff_limit", 0.0)
        self._agreed |= row.get("rollout/log_prob_diff_mean", math.inf) <= limit

    def _name(self, found: Iterable[tuple[str, str]], step: int) -> None:
        for name, text in found:
            if name not in self.named:
                self.named[name] = text
                self._tell(name, text, step)
