"""Compute accuracy, pass@k and maj@k with confidence intervals from the verdicts on responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tandem.algorithms.evaluation import Estimate, Floats, estimate, majority_at_k, pass_at_k
from tandem.config.generate import MeasuresConfig

OVERALL = "overall"
"""The key for the measures over all data sources."""


class Verdict(NamedTuple):
    """The reward's verdict on a response: its score, and the answer that was found.

    `answer` is the answer in the response, or None. `reads_answers` is whether the reward looks for an
    answer. `why` is the reward's reason for the score.
    """

    row: int
    sample: int
    score: float
    right: bool
    answer: str | None
    reads_answers: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """The measures of one data source, or over all data sources.

    Attributes:
        problems: the number of problems.
        responses: the number of responses.
        measures: a dict from name, such as "pass@4", to estimate.
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
    """Estimate score, accuracy, pass@k and maj@k for each data source and overall.

    The measure "score" is the mean score. The accuracy is the fraction of correct responses. maj@k is
    estimated if the reward reads answers.

    Args:
        verdicts: a dict from problem number, from 0, to the verdicts on its responses.
        names: (P) the data source of each problem.
        ks: the values of k, at most the smallest number of responses to a problem.
        how: the confidence level and bootstrap settings of the intervals.
        seed: the seed of the bootstrap.
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
    """Return a dict from measure to its value for each problem, (P)."""
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
