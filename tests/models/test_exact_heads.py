"""Exact quantities over the vocabulary, compared with a softmax over all logits, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.models.heads import tiled
from tandem.models.heads.exact import kl_divergence, sum_pi_squared
from tests.support.heads import Largest, cut, log_softmax, make_case


def divergence(hidden, weight, other, other_weight, *rule):
    log_p, log_q = log_softmax(hidden, weight, *rule), log_softmax(other, other_weight, *rule)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def squares(hidden, weight, *rule):
    return log_softmax(hidden, weight, *rule).exp().square().sum(-1).detach()


def make_pair(rows, vocabulary, features, dtype, *, apart=0.3, device="cpu", seed=0, **options):
    hidden, weight, _ = make_case(rows, vocabulary, features, dtype, seed=seed, device=device, **options)
    draw = torch.Generator().manual_seed(seed + 1)
    others = []
    for leaf in (hidden, weight):
        noise = torch.randn(leaf.shape, generator=draw, dtype=torch.float64).to(device)
        others.append((leaf.detach().double() + apart * noise).to(dtype))
    return hidden, weight, *others


def compared(case, temperature, softcap=0.0, mix=None):
    """Return (divergence, its gradients) as found and in float64, and the wide leaves."""
    wide = [leaf.detach().double().requires_grad_() for leaf in case[:2]]
    got = kl_divergence(*case, temperature=temperature, softcap=softcap)
    want = divergence(*wide, *case[2:], temperature, softcap)
    mix = torch.ones_like(want) if mix is None else mix
    found = torch.autograd.grad((mix * got).sum(), case[:2])
    return (got, found), (want, torch.autograd.grad((mix * want).sum(), wide)), wide


@pytest.mark.equation("kl/full")
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(0, 20), st.integers(1, 70), st.integers(1, 12)),
    tile=st.integers(1, 80),
    temperature=st.floats(0.1, 10.0),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    apart=st.sampled_from([0.0, 1e-3, 1.0]),
    softcap=st.sampled_from([0.0, 2.0, 30.0]),
    seed=st.integers(0, 2**32 - 2),
)
def test_any_shape_in_float64(sizes, tile, temperature, scale, apart, softcap, seed):
    case = make_pair(*sizes, torch.float64, apart=apart, scale=scale * temperature, seed=seed)
    mix = torch.arange(1.0, sizes[0] + 1, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        cut(patch, tile)
        (got, found), (want, expected), wide = compared(case, temperature, softcap, mix)
        collisions = sum_pi_squared(*case[:2], temperature=temperature, softcap=softcap)
    size = 1 + (wide[0] @ wide[1].T).abs().max().item() / temperature if sizes[0] else 1.0
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12 * size)
    assert bool((got >= 0).all()) and not collisions.requires_grad
    torch.testing.assert_close(collisions, squares(*case[:2], temperature, softcap), rtol=1e-10, atol=1e-13)
    for gradient, leaf, other in zip(found, expected, (wide[1], wide[0]), strict=True):
        allowed = 1e-12 * size * (leaf.norm() + mix.norm() * other.detach().norm() / temperature)
        assert gradient.shape == leaf.shape and (gradient - leaf).norm() <= allowed


DTYPES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
GPU = [("cuda", None, dtype, 1e-4, 1e-5, 1e-2) for dtype in DTYPES]
CPUS = [("cpu", width, dtype, 1e-5, 1e-6, DTYPES[dtype]) for width in (8, 64) for dtype in DTYPES]


@pytest.mark.equation("kl/full")
@pytest.mark.parametrize(
    ("device", "width", "dtype", "rtol", "atol", "tolerance"),
    [*CPUS, *(pytest.param(*case, marks=pytest.mark.gpu) for case in GPU)],
)
def test_lower_precision(device, width, dtype, rtol, atol, tolerance, monkeypatch):
    if width is not None:
        cut(monkeypatch, width)
    case = make_pair(*((37, 29, 12) if device == "cpu" else (300, 1000, 64)), dtype, device=device)
    (got, found), (want, expected), _ = compared(case, 0.7)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)
    for gradient, leaf in zip(found, expected, strict=True):
        assert gradient.dtype == dtype
        assert (gradient.double() - leaf).norm() <= tolerance * leaf.norm()
    collisions = sum_pi_squared(*case[:2], temperature=0.7)
    torch.testing.assert_close(collisions.double(), squares(*case[:2], 0.7), rtol=rtol, atol=atol / 10)


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
    hidden, weight, *other = make_pair(9, 29, 12, torch.float64)
    frozen = weight.detach()
    kl_divergence(hidden, frozen, *other, temperature=1.0).sum().backward()
    (expected,) = torch.autograd.grad(divergence(hidden, frozen, *other, 1.0).sum(), hidden)
    torch.testing.assert_close(hidden.grad, expected)


def test_nothing_is_larger_than_a_tile_or_the_weight():
    case = make_pair(1024, 16384, 8, torch.bfloat16)
    with Largest() as largest:
        torch.autograd.backward(kl_divergence(*case, temperature=0.9).sum())
        sum_pi_squared(*case[:2], temperature=0.9)
    assert largest.bytes <= tiled.TILE_BYTES["cpu"] < 1024 * 16384 * 2 / 5
