"""Exact quantities over the vocabulary, compared with a softmax over all logits, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.models.heads import tiled
from tandem.models.heads.exact import kl_divergence, sum_pi_squared
from tests.support.heads import Largest, cut, make_case


def divergence(hidden, weight, other, other_weight, temperature):
    """Return Σ p (log p - log q), computed directly."""
    log_p = torch.log_softmax(hidden.double() @ weight.double().T / temperature, -1)
    log_q = torch.log_softmax(other.double() @ other_weight.double().T / temperature, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def squares(hidden, weight, temperature):
    return torch.softmax(hidden.double() @ weight.double().T / temperature, -1).square().sum(-1)


def make_pair(rows, vocabulary, features, dtype, *, apart=0.3, scale=1.0, seed=0):
    """Return two distributions that are close to each other."""
    hidden, weight, _ = make_case(rows, vocabulary, features, dtype, scale=scale, seed=seed)
    draw = torch.Generator().manual_seed(seed + 1)
    other, other_weight = (
        (leaf.detach().double() + apart * torch.randn(leaf.shape, generator=draw, dtype=torch.float64)).to(
            dtype
        )
        for leaf in (hidden, weight)
    )
    return hidden, weight, other, other_weight


@pytest.mark.equation("kl/full")
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 20),
    vocabulary=st.integers(1, 70),
    features=st.integers(1, 12),
    tile=st.integers(1, 80),
    temperature=st.floats(0.1, 10.0),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    apart=st.sampled_from([0.0, 1e-3, 1.0]),
    seed=st.integers(0, 2**32 - 2),
)
def test_any_shape_in_float64(rows, vocabulary, features, tile, temperature, scale, apart, seed):
    case = make_pair(
        rows, vocabulary, features, torch.float64, apart=apart, scale=scale * temperature, seed=seed
    )
    wide = [leaf.detach().clone().requires_grad_() for leaf in case[:2]]
    with pytest.MonkeyPatch.context() as patch:
        cut(patch, tile)
        got = kl_divergence(*case, temperature=temperature)
        mix = torch.arange(1.0, rows + 1, dtype=torch.float64)
        found = torch.autograd.grad((mix * got).sum(), case[:2])
        collisions = sum_pi_squared(*case[:2], temperature=temperature)
    want = divergence(*wide, *case[2:], temperature)
    expected = torch.autograd.grad((mix * want).sum(), wide)
    size = 1 + (wide[0] @ wide[1].T).abs().max().item() / temperature if rows else 1.0
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12 * size)
    assert bool((got >= 0).all()) and not collisions.requires_grad
    torch.testing.assert_close(collisions, squares(*case[:2], temperature).detach(), rtol=1e-10, atol=1e-13)
    for gradient, leaf, other in zip(found, expected, (wide[1], wide[0]), strict=True):
        allowed = 1e-12 * size * (leaf.norm() + mix.norm() * other.detach().norm() / temperature)
        assert gradient.shape == leaf.shape and (gradient - leaf).norm() <= allowed


@pytest.mark.equation("kl/full")
@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_lower_precision(width, dtype, tolerance, monkeypatch):
    cut(monkeypatch, width)
    case = make_pair(37, 29, 12, dtype)
    wide = [leaf.detach().double().requires_grad_() for leaf in case[:2]]
    got, want = kl_divergence(*case, temperature=0.7), divergence(*wide, *case[2:], 0.7)
    assert got.dtype == torch.float32
    torch.testing.assert_close(
        got.double(), want, rtol=1e-5, atol=1e-6
    )  # for any precision of the hidden states
    pairs = zip(torch.autograd.grad(got.sum(), case[:2]), torch.autograd.grad(want.sum(), wide), strict=True)
    for gradient, expected in pairs:
        assert gradient.dtype == dtype
        assert (gradient.double() - expected).norm() <= tolerance * expected.norm()
    found = sum_pi_squared(*case[:2], temperature=0.7)
    torch.testing.assert_close(found.double(), squares(*case[:2], 0.7).detach(), rtol=1e-5, atol=1e-7)


def test_equal_policies_are_apart_by_nothing_and_have_no_slope():
    hidden, weight, _ = make_case(9, 29, 12, torch.float32, scale=20.0)
    found = kl_divergence(hidden, weight, hidden.detach(), weight.detach(), temperature=0.7)
    assert found.tolist() == [0.0] * 9
    assert all(not g.any() for g in torch.autograd.grad(found.sum(), (hidden, weight)))


@pytest.mark.equation("kl/full")
def test_close_policies_with_large_logits_keep_their_digits():
    """In float32, logits of hundreds have errors of up to 3e-5 each."""
    hidden, weight, _ = make_case(9, 29, 12, torch.float64, scale=100.0)
    whole = [leaf.detach().round().float().requires_grad_() for leaf in (hidden, weight)]
    other = whole[0].detach() + torch.eye(9, 12)
    found = kl_divergence(*whole, other, whole[1].detach(), temperature=16.0)
    want = divergence(*whole, other, whole[1], 16.0).detach()
    assert (whole[0] @ whole[1].T).abs().max() > 400 and want.max() > 1e-3
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=3e-7)


@pytest.mark.equation("kl/full")
def test_a_frozen_head_gets_no_gradient():
    hidden, weight, other, other_weight = make_pair(9, 29, 12, torch.float64)
    frozen = weight.detach()
    kl_divergence(hidden, frozen, other, other_weight, temperature=1.0).sum().backward()
    kept = hidden.grad
    (expected,) = torch.autograd.grad(divergence(hidden, frozen, other, other_weight, 1.0).sum(), hidden)
    torch.testing.assert_close(kept, expected)


def test_nothing_is_larger_than_a_tile_or_the_weight():
    case = make_pair(1024, 16384, 8, torch.bfloat16)
    with Largest() as largest:
        torch.autograd.backward(kl_divergence(*case, temperature=0.9).sum())
        sum_pi_squared(*case[:2], temperature=0.9)
    assert largest.bytes <= tiled.TILE_BYTES["cpu"] < 1024 * 16384 * 2 / 5


@pytest.mark.equation("kl/full")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype):
    case = [leaf.detach().cuda() for leaf in make_pair(300, 1000, 64, dtype)]
    leaves = [leaf.requires_grad_() for leaf in case[:2]]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    got, want = kl_divergence(*case, temperature=0.7), divergence(*wide, *case[2:], 0.7)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    pairs = zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), wide), strict=True)
    for gradient, expected in pairs:
        assert (gradient.double() - expected).norm() <= 1e-2 * expected.norm()
    found = sum_pi_squared(*case[:2], temperature=0.7)
    torch.testing.assert_close(found.double(), squares(*case[:2], 0.7).detach(), rtol=1e-4, atol=1e-6)
