from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.value_loss import clipped_value_loss


@pytest.mark.equation("parts/clipped_value_loss")
@given(seed=st.integers(0, 2**31), count=st.integers(1, 50), clip=st.floats(0.01, 2.0))
@settings(deadline=None, max_examples=80)
def test_value_and_gradient(seed: int, count: int, clip: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, count, generator=generator, dtype=torch.float64).unbind()
    values.requires_grad_()
    losses, metrics = clipped_value_loss(values, old, returns, cliprange_value=clip)
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    for i in range(count):
        v, v_old, target = values[i].item(), old[i].item(), returns[i].item()
        v_clip = min(max(v, v_old - clip), v_old + clip)
        plain, clipped = (v - target) ** 2, (v_clip - target) ** 2
        want = torch.tensor(
            [max(plain, clipped) / 2, v - target if plain >= clipped else 0.0], dtype=torch.float64
        )
        torch.testing.assert_close(torch.stack((losses[i].detach(), gradient[i])), want)
        assert metrics["clip_fraction"][i].item() == float(clipped > plain)


@pytest.mark.equation("parts/clipped_value_loss")
def test_by_hand() -> None:
    losses, metrics = clipped_value_loss(
        torch.tensor([2.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([3.0, 1.0]), cliprange_value=0.5
    )
    torch.testing.assert_close(losses, torch.tensor([0.5 * 2.5**2, 0.5 * 0.9**2]))
    assert metrics["clip_fraction"].tolist() == [1.0, 0.0]
