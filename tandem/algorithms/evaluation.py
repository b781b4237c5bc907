"""The scores of n responses to each problem, summed up: pass@k, maj@k, and how sure they are.

Shapes: P problems.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Votes = tuple[tuple[int, float], ...]
"""Pairs of how many gave an answer and which share of them is right."""

_RESAMPLED_NUMBERS = 1 << 22
"""Numbers drawn at a time, to keep the memory small."""


def pass_at_k(samples: NDArray[np.int64], right: NDArray[np.int64], k: int) -> Floats:
    """The probability that at least one of k responses is right, estimated without bias.

    Args:
        samples: (P) n, the responses to each problem, at least k.
        right: (P) c, how many of them are right.
        k: responses drawn, at least 1.

    Returns:
        (P).

    Equation, of each problem:

        pass@k = 1 - C(n - c, k) / C(n, k)

    When to use: `tandem eval`, to say what a model can do given several tries.
    Watch: `pass@k` grows with k; where it is not above `accuracy`, the samples are all alike.
    Cost: n responses to each problem, n at least k; the nearer n is to k, the wider the interval.
    Source: Chen et al., "Evaluating Large Language Models Trained on Code", 2021,
    https://arxiv.org/abs/2107.03374
    """
    assert samples.shape == right.shape and 1 <= k <= samples.min(), (samples.shape, right.shape, k)
    drawn_K = np.arange(k)
    wrong_PK = np.clip((samples - right)[:, None] - drawn_K, 0, None)
    missed: Floats = np.prod(wrong_PK / (samples[:, None] - drawn_K), axis=1)
    return 1.0 - missed


def majority_at_k(answers: Sequence[Hashable | None], right: Sequence[bool], k: int) -> float:
    """The probability that the most frequent answer of k responses, drawn without replacement from the n
    given, is right: exact, not simulated. Answers that are equally frequent win equally often. A response
    without an answer (None) does not vote; where none votes, the problem is lost.

    Equation (S every set of k of the n responses, W its most frequent answers, right(a) the share of the
    responses with answer a that are right):

        maj@k = sum_S mean_{a in W(S)} right(a) / C(n, k)

    Args:
        answers: (n) one per response.
        right: (n) whether it is right; should equal answers differ in that, their mean counts.
        k: responses drawn, 1 to n.

    When to use: `tandem eval`, to say what a model can do when its answers vote.
    Watch: `maj@k` above `accuracy` says that wrong answers disagree among themselves; below, that one wrong
    answer is the usual one.
    Cost: n responses to each problem; the expectation over all draws is computed, not sampled.
    Source: Wang et al., "Self-Consistency Improves Chain of Thought Reasoning in Language Models", 2022,
    https://arxiv.org/abs/2203.11171 (the vote; its expectation over draws is computed here)
    """
    assert len(answers) == len(right) and 1 <= k <= len(answers), (len(answers), len(right), k)
    given: dict[Hashable, list[bool]] = {}
    for answer, is_right in zip(answers, right, strict=True):
        if answer is not None:
            given.setdefault(answer, []).append(is_right)
    votes = sorted((len(each), sum(each) / len(each)) for each in given.values())
    return _majority(tuple(votes), len(answers), k)


@lru_cache(maxsize=4096)  # problems repeat each other: all right, all wrong, one apart
def _majority(votes: Votes, n: int, k: int) -> float:
    """Sums over how often the winner was drawn. Counts of draws from a fixed number of responses are
    independent binomials given their sum, which keeps all numbers between 0 and 1."""
    share = k / n
    silent = _binomial(n - sum(count for count, _ in votes), share)
    lines = [(_binomial(count, share), value) for count, value in votes]
    most = min(k, max((count for count, _ in votes), default=0))
    won = sum(_won_with(top, silent, lines, k) for top in range(1, most + 1))
    return float(won / _binomial(n, share)[k])


def _won_with(top: int, silent: Floats, lines: Sequence[tuple[Floats, float]], k: int) -> float:
    """The part of the probability in which the winner was drawn `top` times, before it is conditioned on
    k draws: a product of generating functions, in draws (columns) and in answers tied at the top (rows)."""
    ways = np.zeros((k // top + 2, k + 1))
    worth = np.zeros_like(ways)  # weighed by the summed value of those tied
    ways[0] = _padded(silent, k)
    for drawn, value in lines:
        below = _shifts(drawn[:top], k)
        at_top = drawn[top] if len(drawn) > top else 0.0
        tied = np.zeros_like(ways)
        tied_worth = np.zeros_like(ways)
        tied[1:, top:] = at_top * ways[:-1, : k + 1 - top]
        tied_worth[1:, top:] = at_top * worth[:-1, : k + 1 - top]
        worth = worth @ below + tied_worth + value * tied
        ways = ways @ below + tied
    return float(worth[1:, k] @ (1.0 / np.arange(1, len(worth))))


def _binomial(n: int, p: float) -> Floats:
    """(n + 1) probabilities of 0 to n successes."""
    if p == 1.0:
        return np.array([0.0] * n + [1.0])
    log_ways = [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in range(n + 1)]
    successes = np.arange(n + 1)
    found: Floats = np.exp(log_ways + successes * math.log(p) + (n - successes) * math.log1p(-p))
    return found


def _padded(row: Floats, k: int) -> Floats:
    return np.pad(row[: k + 1], (0, max(0, k + 1 - len(row))))


def _shifts(row: Floats, k: int) -> Floats:
    """(k + 1, k + 1): a product with it multiplies polynomials of degree up to k by that of `row`."""
    padded = np.concatenate([np.zeros(k), _padded(row, k)])
    return np.lib.stride_tricks.sliding_window_view(padded, k + 1)[::-1]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems and its confidence interval.

    Attributes:
        value, low, high: in the unit of the values.
        method: how the interval was made.
    """

    value: float
    low: float
    high: float
    method: Literal["wilson", "bootstrap"]


def estimate(
    values: Floats, *, confidence: float, resamples: int, seed: int, bounded: bool = True
) -> Estimate:
    """The mean over problems with an interval for what other problems of their kind would give.

    Where each problem is either right or wrong, Wilson's score interval, which is sensible for few
    problems and for none or all of them right. Where all are alike in between, too: nothing between 0 and 1
    varies more than right and wrong do, so it is wide enough. Else the percentile bootstrap over problems:
    the responses to one problem are not independent of each other, so whole problems are drawn. For few
    problems that interval is too narrow: of one at 95%, about 85% hold the truth with 5 problems, 91% with
    10. Of values without bounds that are all alike it says nothing: it is that value alone.

    Args:
        values: (P) of each problem.
        confidence: probability of the interval, such as 0.95.
        resamples: of the bootstrap.
        seed: of the bootstrap.
        bounded: whether a problem's value is between 0 and 1 by its nature.

    Source: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", 1927; Efron and
    Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13
    """
    assert values.ndim == 1 and len(values), values.shape
    mean = float(values.mean())
    if bounded and (np.isin(values, (0.0, 1.0)).all() or (values == values[0]).all()):
        count, z = len(values), NormalDist().inv_cdf((1 + confidence) / 2)
        centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
        variance = mean * (1 - mean) / count + z * z / (4 * count * count)
        half = z / (1 + z * z / count) * math.sqrt(variance)
        return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half), "wilson")
    rng = np.random.default_rng(seed)
    part = max(1, _RESAMPLED_NUMBERS // len(values))
    means = np.concatenate(
        [
            rng.choice(values, size=(min(part, resamples - start), len(values))).mean(axis=1)
            for start in range(0, resamples, part)
        ]
    )
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(mean, float(low), float(high), "bootstrap")
