"""Measures of a model from the verdicts of the reward on its responses, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tandem.algorithms.evaluation import Estimate, Floats, estimate, majority_at_k, pass_at_k
from tandem.config.generate import MeasuresConfig

OVERALL = "overall"
"""Stands beside the data sources for all of them together."""


class Verdict(NamedTuple):
    """The verdict of the reward on a response; `answer` is the answer that the response gives, if any,
    `reads_answers` whether the reward looks for one, and `why` what it says of the score."""

    row: int
    sample: int
    score: float
    right: bool
    answer: str | None
    reads_answers: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """The measures on the problems of one data source, or on all.

    Attributes:
        problems, responses: how many there are.
        measures: by name, such as "pass@4".
    """

    problems: int
    responses: int
    measures: dict[str, Estimate]


def measure(
    verdicts: Mapping[int, Sequence[Verdict]],
    names: Sequence[str],
    ks: Sequence[int],
    how: MeasuresConfig,
    *,
    seed: int,
) -> dict[str, Source]:
    """Measures the score (its mean), accuracy (the share of right responses), pass@k, and maj@k where the
    reward reads answers; for each data source and overall.

    Args:
        verdicts: of the responses to each problem, by its number from 0.
        names: (P) the data source of each problem.
        ks: none above the number of responses to any problem.
        how: confidence and bootstrap of the intervals.
        seed: of the bootstrap.
    """
    problems = [verdicts[row] for row in range(len(names))]
    values = _values(problems, ks)
    voting = {names[row] for row, problem in enumerate(problems) if any(v.reads_answers for v in problem)}
    bounded = [all(0 <= verdict.score <= 1 for verdict in problem) for problem in problems]
    found = {}
    for group in (*sorted(set(names)), OVERALL):
        rows = [row for row, name in enumerate(names) if group in (name, OVERALL)]
        votes = voting.issuperset(names[row] for row in rows)
        measures = {
            measure: estimate(
                column[rows],
                confidence=how.confidence,
                resamples=how.bootstrap_samples,
                seed=seed,
                bounded=measure != "score" or all(bounded[row] for row in rows),
            )
            for measure, column in values.items()
            if votes or not measure.startswith("maj@")
        }
        found[group] = Source(len(rows), sum(len(problems[row]) for row in rows), measures)
    return found


def _values(problems: Sequence[Sequence[Verdict]], ks: Sequence[int]) -> dict[str, Floats]:
    """The value of each measure for each problem, (P)."""
    samples = np.array(list(map(len, problems)))
    right = np.array([sum(verdict.right for verdict in problem) for problem in problems])
    values = {
        "score": np.array([np.mean([verdict.score for verdict in problem]) for problem in problems]),
        "accuracy": right / samples,
    }
    values |= {f"pass@{k}": pass_at_k(samples, right, k) for k in ks}
    for k in ks:
        if k > 1:
            won = [majority_at_k([v.answer for v in p], [v.right for v in p], k) for p in problems]
            values[f"maj@{k}"] = np.array(won)
    return values
