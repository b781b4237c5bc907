"""The preference loss, compared with its formula written out for one pair."""

import math

import pytest
import torch

from tandem.algorithms.bradley_terry import bradley_terry_loss


def double(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.equation("parts/bradley_terry_loss")
@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_each_pair_by_hand(coefficient):
    """The gradient pushes the rewards apart by the chance of being wrong."""
    pair = chosen, rejected = double(0.3, -2.0, 40.0, -40.0, 0), double(-0.5, 1.0, -40.0, 40.0, 0)
    margin = double(0.0, 0.5, 1.0, 0.25, 0).detach()
    found = bradley_terry_loss(*pair, margin, center_coefficient=coefficient)
    expected = []
    for a, b, m in zip(chosen.tolist(), rejected.tolist(), margin.tolist(), strict=True):
        gap = a - b - m
        surprise = math.log1p(math.exp(-gap)) if gap > 0 else -gap + math.log1p(math.exp(gap))
        expected.append(surprise + coefficient * (a + b) ** 2)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    if coefficient == 0:
        assert found[-1].item() == pytest.approx(math.log(2), rel=1e-15)  # equal rewards
    wrong = torch.sigmoid(-(chosen - rejected - margin)).detach()
    centre = 2 * coefficient * (chosen + rejected).detach()
    for gradient, want in zip(
        torch.autograd.grad(found.sum(), pair), (centre - wrong, centre + wrong), strict=True
    ):
        torch.testing.assert_close(gradient, want, rtol=1e-12, atol=1e-15)


def test_unequal_shapes_are_a_bug():
    with pytest.raises(AssertionError):
        bradley_terry_loss(torch.zeros(3), torch.zeros(3), torch.zeros(1))
