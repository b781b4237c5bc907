"""Evaluation scores over n responses to each problem: pass@k, maj@k and confidence intervals.

Shapes: P is the number of problems.
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
"""Pairs of (number of responses that gave an answer, fraction of these responses that are correct)."""

_RESAMPLED_NUMBERS = 1 << 22
"""Number of values drawn at a time, which bounds the memory."""


def pass_at_k(samples: NDArray[np.int64], right: NDArray[np.int64], k: int) -> Floats:
    """Return the unbiased estimate of the probability that at least one of k responses is correct.

    Args:
        samples: (P) n, the number of responses to each problem, at least k.
        right: (P) c, the number of correct responses to each problem.
        k: number of responses drawn, at least 1.

    Returns:
        (P) probabilities.

    Equation (for each problem):

        pass@k = 1 - C(n - c, k) / C(n, k)

    When to use: `tandem eval`, to measure what a model can solve with several tries.
    Watch: `pass@k` grows with k; if it is not above `accuracy`, the samples of a problem are all alike.
    Cost: n responses to each problem, with n at least k; the nearer n is to k, the wider the confidence
        interval.
    Source: Chen et al., "Evaluating Large Language Models Trained on Code", 2021,
        https://arxiv.org/abs/2107.03374
    """
    assert samples.shape == right.shape and 1 <= k <= samples.min(), (samples.shape, right.shape, k)
    drawn_K = np.arange(k)
    wrong_PK = np.clip((samples - right)[:, None] - drawn_K, 0, None)
    missed: Floats = np.prod(wrong_PK / (samples[:, None] - drawn_K), axis=1)
    return 1.0 - missed


def majority_at_k(answers: Sequence[Hashable | None], right: Sequence[bool], k: int) -> float:
    """Return the probability that the most frequent answer of k responses is correct.

    The k responses are drawn without replacement from the n responses. The result is exact, not simulated. If
    several answers are equally frequent, each of them wins with the same probability. A response without an
    answer (None) does not vote. A draw without any vote counts as wrong.

    Equation (S is every set of k of the n responses; W(S) are the most frequent answers in S; right(a) is the
    share of the responses with answer a that are correct):

        maj@k = sum_S mean_{a in W(S)} right(a) / C(n, k)

    Args:
        answers: (n) the answer of each response.
        right: (n) whether the response is correct. If this differs between responses with equal answers,
            their mean is used.
        k: number of responses drawn, from 1 to n.

    When to use: `tandem eval`, to measure a model whose answers are combined by majority vote.
    Watch: `maj@k` above `accuracy` means that wrong responses disagree with each other; below `accuracy`
        means that the most common answer is often wrong.
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


@lru_cache(maxsize=4096)  # many problems have the same votes, such as all right or all wrong
def _majority(votes: Votes, n: int, k: int) -> float:
    """Return maj@k, as a sum over the number of times that the winning answer was drawn.

    The numbers of draws per answer are treated as independent binomials, conditioned on their sum being k.
    This keeps all values between 0 and 1.
    """
    share = k / n
    silent = _binomial(n - sum(count for count, _ in votes), share)
    lines = [(_binomial(count, share), value) for count, value in votes]
    most = min(k, max((count for count, _ in votes), default=0))
    won = sum(_won_with(top, silent, lines, k) for top in range(1, most + 1))
    return float(won / _binomial(n, share)[k])


def _won_with(top: int, silent: Floats, lines: Sequence[tuple[Floats, float]], k: int) -> float:
    """Return the probability that the winning answer was drawn exactly `top` times, before conditioning.

    Conditioning on k draws in total is left to the caller. The result is a product of generating functions,
    in the number of draws (columns) and the number of answers that share the top count (rows).
    """
    ways = np.zeros((k // top + 2, k + 1))
    worth = np.zeros_like(ways)  # `ways`, weighted by the summed value of the tied answers
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
    """Return the n + 1 probabilities of 0 to n successes."""
    if p == 1.0:
        return np.array([0.0] * n + [1.0])
    log_ways = [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in range(n + 1)]
    successes = np.arange(n + 1)
    found: Floats = np.exp(log_ways + successes * math.log(p) + (n - successes) * math.log1p(-p))
    return found


def _padded(row: Floats, k: int) -> Floats:
    return np.pad(row[: k + 1], (0, max(0, k + 1 - len(row))))


def _shifts(row: Floats, k: int) -> Floats:
    """Return the (k + 1, k + 1) matrix that multiplies a polynomial of degree ≤ k by the polynomial `row`."""
    padded = np.concatenate([np.zeros(k), _padded(row, k)])
    return np.lib.stride_tricks.sliding_window_view(padded, k + 1)[::-1]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems with its confidence interval.

    Attributes:
        value: the mean.
        low: lower end of the interval.
        high: upper end of the interval.
        method: how the interval was computed.
    """

    value: float
    low: float
    high: float
    method: Literal["wilson", "bootstrap"]


def estimate(
    values: Floats, *, confidence: float, resamples: int, seed: int, bounded: bool = True
) -> Estimate:
    """Return the mean over problems and a confidence interval for other problems of the same kind.

    The interval is chosen as follows:

    - If every value is 0 or 1: Wilson's score interval. It works for few problems, and if none or all are
      right.
    - If all values are equal and bounded: Wilson's interval too. A quantity between 0 and 1 varies at most as
      much as a quantity that is 0 or 1, so the interval is wide enough.
    - Otherwise: the percentile bootstrap over problems. It draws whole problems, because the responses to one
      problem are not independent. For few problems this interval is too narrow: of the 95% intervals, about
      85% contain the true mean with 5 problems, and 91% with 10. If unbounded values are all equal, the
      interval has width 0 and tells nothing.

    Args:
        values: (P) value of each problem.
        confidence: probability of the interval, such as 0.95.
        resamples: number of bootstrap samples.
        seed: seed of the bootstrap.
        bounded: whether a problem's value is always between 0 and 1.

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
