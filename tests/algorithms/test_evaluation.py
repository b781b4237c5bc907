"""pass@k, maj@k and their intervals, compared with cases computed by hand and with all possible draws."""

import math
from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest

from tandem.algorithms.evaluation import estimate, majority_at_k, pass_at_k


@pytest.mark.equation("parts/pass_at_k")
@pytest.mark.parametrize(("n", "right", "k"), [(1, 1, 1), (7, 2, 3), (7, 5, 3), (8, 3, 8), (200, 4, 100)])
def test_pass_at_k_is_the_quotient_of_binomials(n, right, k):
    expected = 1 - math.comb(n - right, k) / math.comb(n, k)
    assert pass_at_k(np.array([n]), np.array([right]), k)[0] == pytest.approx(expected, rel=1e-12)


def by_every_draw(answers, right, k):
    """Compute maj@k by counting over every subset of k responses."""
    value = {a: np.mean([r for b, r in zip(answers, right, strict=True) if b == a]) for a in answers}
    won = []
    for draw in combinations(answers, k):
        votes = Counter(answer for answer in draw if answer is not None)
        most = max(votes.values(), default=0)
        tied = [value[answer] for answer, count in votes.items() if count == most]
        won.append(np.mean(tied) if tied else 0.0)
    return float(np.mean(won))


@pytest.mark.equation("parts/majority_at_k")
def test_majority_by_hand():
    # Answers a a b, a is correct: the pair aa wins, and the two pairs ab tie and win half of the time.
    assert majority_at_k(["a", "a", "b"], [True, True, False], 2) == pytest.approx(2 / 3, rel=1e-12)
    assert majority_at_k(["a", "a", "b"], [True, True, False], 3) == 1.0
    assert majority_at_k([None, None], [False, False], 1) == 0.0
    # Two equally frequent answers, 255 of 512 responses drawn: by symmetry, each wins half of the time.
    assert majority_at_k(["a", "b"] * 256, [True, False] * 256, 255) == pytest.approx(0.5, abs=1e-9)


@pytest.mark.equation("parts/majority_at_k")
def test_majority_is_the_mean_over_every_draw():
    rng = np.random.default_rng(0)
    for n in (1, 2, 5, 9):
        for _ in range(12):
            answers = [None if a == 0 else str(a) for a in rng.integers(0, rng.integers(2, 7), size=n)]
            right = [answer == "1" or (answer == "2" and bool(rng.random() < 0.5)) for answer in answers]
            for k in range(1, n + 1):
                expected = by_every_draw(answers, right, k)
                assert majority_at_k(answers, right, k) == pytest.approx(expected, abs=1e-12), (answers, k)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        # 8 of 10 at z = 1.959964: (0.8 + z²/20) / (1 + z²/10) ± z / (1 + z²/10) · sqrt(0.016 + z²/400).
        ([1.0] * 8 + [0.0] * 2, (0.8, 0.490162, 0.943318)),
        ([1.0] * 10, (1.0, 0.722467, 1.0)),
        # One problem, half correct: 0.5 ± z / (1 + z²) · sqrt(0.25 + z²/4).
        ([0.5], (0.5, 0.054620, 0.945380)),
    ],
)
def test_wilsons_interval_by_hand(values, wanted):
    found = estimate(np.array(values), confidence=0.95, resamples=100, seed=0)
    assert found.method == "wilson"
    assert (found.value, found.low, found.high) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(("values", "wanted"), [([0.0, 1.0], (0.0, 0.5, 1.0)), ([0.0] * 3, (0.0, 0.0, 0.0))])
def test_values_without_bounds_have_no_wilsons_interval(values, wanted):
    found = estimate(np.array(values), confidence=0.95, resamples=1000, seed=0, bounded=False)
    assert (found.low, found.value, found.high, found.method) == (*wanted, "bootstrap")


def test_bootstrap_interval_against_every_resample():
    values = np.array([0.0, 0.25, 0.5, 1.0, 1.0])
    options = {"confidence": 0.9, "resamples": 20_000, "seed": 3}
    every = np.sort([np.mean(draw) for draw in product(values, repeat=5)])
    found = estimate(values, **options)
    assert (found.value, found.method) == (0.55, "bootstrap")
    assert (found.low, found.high) == (every[round(0.05 * len(every))], every[round(0.95 * len(every))])
    assert found == estimate(values, **options)
