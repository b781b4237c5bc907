"""The preference loss, compared with its formula written out for one pair."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from tandem.algorithms.bradley_terry import bradley_terry_loss

CHOSEN = [0.3, -2.0, 40.0, -40.0]
REJECTED = [-0.5, 1.0, -40.0, 40.0]
MARGIN = [0.0, 0.5, 1.0, 0.25]


def double(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.equation("parts/bradley_terry_loss")
@pytest.mark.parametrize("coefficient", [0.0, 0.01])
def test_each_pair_by_hand(coefficient: float) -> None:
    found = bradley_terry_loss(
        double(CHOSEN), double(REJECTED), torch.tensor(MARGIN).double(), center_coefficient=coefficient
    )
    expected = []
    for chosen, rejected, margin in zip(CHOSEN, REJECTED, MARGIN, strict=True):
        gap = chosen - rejected - margin
        surprise = math.log1p(math.exp(-gap)) if gap > 0 else -gap + math.log1p(math.exp(gap))
        expected.append(surprise + coefficient * (chosen + rejected) ** 2)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.equation("parts/bradley_terry_loss")
def test_the_gradient_pushes_the_rewards_apart_by_the_chance_of_being_wrong() -> None:
    chosen, rejected = double(CHOSEN), double(REJECTED)
    margin = torch.tensor(MARGIN).double()
    bradley_terry_loss(chosen, rejected, margin, center_coefficient=0.1).sum().backward()
    wrong = torch.sigmoid(-(chosen - rejected - margin)).detach()
    centre = 0.2 * (chosen + rejected).detach()
    torch.testing.assert_close(chosen.grad, centre - wrong, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(rejected.grad, centre + wrong, rtol=1e-12, atol=1e-15)


@pytest.mark.equation("parts/bradley_terry_loss")
def test_equal_rewards_cost_log_two() -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    assert bradley_terry_loss(zero, zero, zero).tolist() == pytest.approx([math.log(2)] * 3, rel=1e-15)


def test_unequal_shapes_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        bradley_terry_loss(torch.zeros(3), torch.zeros(3), torch.zeros(1))


def test_its_sources_are_named() -> None:
    text = inspect.getdoc(bradley_terry_loss) or ""
    assert "Bradley and Terry 1952" in text and "arxiv.org/abs/2203.02155" in text
