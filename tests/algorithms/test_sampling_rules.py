"""The penalty on long responses, the filter of prompts and the entropy coefficient, sample by sample."""

import random

import pytest
import torch

from tandem.algorithms.dapo import groups_with_spread, soft_overlong_punishment
from tandem.algorithms.entropy import AdaptiveEntropyController


@pytest.mark.equation("parts/soft_overlong_punishment")
@pytest.mark.parametrize(("limit", "buffer", "factor"), [(20, 5, 1.0), (20, 20, 0.5), (7, 1, 3.0)])
def test_the_punishment_is_the_equations(limit, buffer, factor):
    """DAPO, eq. 13, for responses that are not longer than the limit."""
    lengths, free = torch.arange(limit + 1), limit - buffer
    found = soft_overlong_punishment(lengths, max_length=limit, buffer=buffer, penalty_factor=factor)
    assert found.dtype == torch.float64
    expected = [0.0 if n <= free else factor * (free - n) / buffer for n in range(limit + 1)]
    assert found.tolist() == pytest.approx(expected, abs=1e-15)
    assert (found[-1], found[free]) == (-factor, 0)


@pytest.mark.equation("parts/groups_with_spread")
def test_groups_differ_if_any_two_of_their_values_do():
    draw = random.Random(0)
    for n in (1, 2, 5):
        groups = [[draw.choice((0.1, 0.1, 0.7)) for _ in range(n)] for _ in range(200)]
        found = groups_with_spread(torch.tensor([v for g in groups for v in g], dtype=torch.float64), n)
        expected = [any(a != b for a in group for b in group) for group in groups]
        assert found.tolist() == expected
        assert any(expected) == (n > 1)
    assert groups_with_spread(torch.zeros(0), 3).tolist() == []


def test_equal_values_never_differ_by_rounding():
    """The deviation of ten values of 0.1 from their mean is not exactly 0."""
    assert groups_with_spread(torch.full((30,), 0.1, dtype=torch.float64), 10).tolist() == [False] * 3


def controller(start):
    return AdaptiveEntropyController(start, target=0.2, delta=0.001, minimum=0.0, maximum=0.005)


@pytest.mark.equation("parts/AdaptiveEntropyController")
def test_the_entropy_coefficient_follows_the_rule_within_its_bounds():
    draw, control = random.Random(1), controller(0.002)
    coefficient, seen = 0.002, set()
    assert control.value == 0.002
    for _ in range(200):
        entropy = draw.choice((0.1, 0.1, 0.2, 0.3, 0.3, draw.random()))
        control.update(entropy)
        step = 0.001 * ((entropy < 0.2) - (entropy > 0.2))
        coefficient = min(max(coefficient + step, 0.0), 0.005)
        assert control.value == pytest.approx(coefficient if entropy <= 0.2 else 0.0, abs=1e-12)
        seen.add(round(control.value, 4))
    assert {0.0, 0.005} <= seen


def test_the_entropy_coefficient_goes_on_from_its_state():
    first, second = controller(0.0), controller(0.0)
    for entropy in (0.1, 0.1, 0.4):
        first.update(entropy)
    second.load_state_dict(first.state_dict())
    assert second.value == first.value == 0.0
    for control in (first, second):
        control.update(0.1)
    assert second.value == first.value == pytest.approx(0.002)
