"""The penalty on long responses, the filter of prompts and the entropy coefficient, compared with the papers.

The rules of the papers are written out sample by sample.
"""

from __future__ import annotations

import random

import pytest
import torch

from tandem.algorithms.dapo import groups_with_spread, soft_overlong_punishment
from tandem.algorithms.entropy import AdaptiveEntropyController


def punishment(length: int, limit: int, buffer: int, factor: float) -> float:
    """Return the penalty of DAPO, eq. 13, for a response that is not longer than the limit."""
    if length <= limit - buffer:
        return 0.0
    return factor * ((limit - buffer) - length) / buffer


@pytest.mark.equation("parts/soft_overlong_punishment")
@pytest.mark.parametrize(("limit", "buffer", "factor"), [(20, 5, 1.0), (20, 20, 0.5), (7, 1, 3.0)])
def test_the_punishment_is_the_equations(limit: int, buffer: int, factor: float) -> None:
    lengths = torch.arange(limit + 1)
    found = soft_overlong_punishment(lengths, max_length=limit, buffer=buffer, penalty_factor=factor)
    assert found.dtype == torch.float64
    expected = [punishment(length, limit, buffer, factor) for length in range(limit + 1)]
    assert found.tolist() == pytest.approx(expected, abs=1e-15)
    assert found[-1] == -factor
    assert found[limit - buffer] == 0


@pytest.mark.equation("parts/groups_with_spread")
def test_groups_differ_if_any_two_of_their_values_do() -> None:
    draw = random.Random(0)
    for n in (1, 2, 5):
        groups = [[draw.choice((0.1, 0.1, 0.7)) for _ in range(n)] for _ in range(200)]
        found = groups_with_spread(torch.tensor([v for g in groups for v in g], dtype=torch.float64), n)
        expected = [any(a != b for a in group for b in group) for group in groups]
        assert found.tolist() == expected
        assert any(expected) == (n > 1)
    assert groups_with_spread(torch.zeros(0), 3).tolist() == []


def test_equal_values_never_differ_by_rounding() -> None:
    """Equal values count as equal, even if their deviation from the mean is not exactly 0.

    This is the case for ten values of 0.1.
    """
    assert groups_with_spread(torch.full((30,), 0.1, dtype=torch.float64), 10).tolist() == [False] * 3


@pytest.mark.equation("parts/AdaptiveEntropyController")
def test_the_entropy_coefficient_follows_the_rule_within_its_bounds() -> None:
    draw = random.Random(1)
    control = AdaptiveEntropyController(0.002, target=0.2, delta=0.001, minimum=0.0, maximum=0.005)
    coefficient = 0.002
    assert control.value == 0.002
    seen = set()
    for _ in range(200):
        entropy = draw.choice((0.1, 0.1, 0.2, 0.3, 0.3, draw.random()))
        control.update(entropy)
        if entropy < 0.2:
            coefficient = min(coefficient + 0.001, 0.005)
        elif entropy > 0.2:
            coefficient = max(coefficient - 0.001, 0.0)
        expected = coefficient if entropy <= 0.2 else 0.0
        assert control.value == pytest.approx(expected, abs=1e-12)
        seen.add(round(control.value, 4))
    assert {0.0, 0.005} <= seen


def test_the_entropy_coefficient_goes_on_from_its_state() -> None:
    def made() -> AdaptiveEntropyController:
        return AdaptiveEntropyController(0.0, target=0.2, delta=0.001, minimum=0.0, maximum=0.005)

    first, second = made(), made()
    for entropy in (0.1, 0.1, 0.4):
        first.update(entropy)
    second.load_state_dict(first.state_dict())
    assert second.value == first.value == 0.0
    for control in (first, second):
        control.update(0.1)
    assert second.value == first.value == pytest.approx(0.002)
