import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.value_loss import clipped_value_loss
from tests.algorithms.batches import SEEDS


@pytest.mark.equation("parts/clipped_value_loss")
@given(seed=SEEDS, count=st.integers(1, 50), clip=st.floats(0.01, 2.0))
@settings(deadline=None, max_examples=80)
def test_value_and_gradient(seed, count, clip):
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, count, generator=generator, dtype=torch.float64).unbind()
    values.requires_grad_()
    losses, metrics = clipped_value_loss(values, old, returns, cliprange_value=clip)
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    found = zip(losses.tolist(), gradient.tolist(), metrics["clip_fraction"].tolist(), strict=True)
    for got, v, v_old, target in zip(found, values.tolist(), old.tolist(), returns.tolist(), strict=True):
        plain = (v - target) ** 2
        clipped = (min(max(v, v_old - clip), v_old + clip) - target) ** 2
        slope = v - target if plain >= clipped else 0.0
        assert got == pytest.approx((max(plain, clipped) / 2, slope, float(clipped > plain)), rel=1e-7)


@pytest.mark.equation("parts/clipped_value_loss")
def test_by_hand():
    values, returns = torch.tensor([2.0, 0.1]), torch.tensor([3.0, 1.0])
    losses, metrics = clipped_value_loss(values, torch.zeros(2), returns, cliprange_value=0.5)
    torch.testing.assert_close(losses, torch.tensor([0.5 * 2.5**2, 0.5 * 0.9**2]))
    assert metrics["clip_fraction"].tolist() == [1.0, 0.0]
