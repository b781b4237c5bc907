"""The registry of KL estimators: straight-through forms, and a user's own functions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tandem.algorithms.kl import apply_kl_penalty, kl_penalty, penalise
from tandem.algorithms.kl_estimators import straight_through
from tandem.algorithms.registry import KL_ESTIMATORS, kl_estimator
from tandem.errors import ConfigError

OWN_FILE = """
def cubic(log_probs, ref_log_probs):
    return (log_probs - ref_log_probs) ** 3

def misnamed(log_probs, reference): ...
def total(log_probs, ref_log_probs): return (log_probs - ref_log_probs).sum()
"""


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_kl.py"
    path.write_text(OWN_FILE)
    return path


def test_what_is_registered() -> None:
    assert KL_ESTIMATORS.names == ("abs", "k1", "k2", "k3")
    assert KL_ESTIMATORS.aliases == {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
    assert all(kl_estimator(name).columns == ("log_probs", "ref_log_probs") for name in KL_ESTIMATORS.names)


@pytest.mark.equation("kl/abs", "kl/k1", "kl/k2", "kl/k3")
def test_the_mean_gradient_of_a_straight_through_form_is_that_of_the_kl() -> None:
    """The mean over all outcomes of a small policy equals the gradient of Σ p log p/q."""
    draw = torch.Generator().manual_seed(3)
    logits, other = torch.randn(2, 7, generator=draw, dtype=torch.float64)
    logits.requires_grad_()
    log_p, log_q = torch.log_softmax(logits, 0), torch.log_softmax(other, 0)
    (expected,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits, retain_graph=True)
    chances = log_p.detach().exp()
    found = {}
    for kind in ("k1", "k1+", "abs+", "k2", "k2+", "k3", "k3+"):
        mean = (chances * kl_penalty(log_p, log_q, kind)).sum()
        (found[kind],) = torch.autograd.grad(mean, logits, retain_graph=True)
    for kind in ("k1+", "abs+", "k2", "k2+", "k3+"):
        torch.testing.assert_close(found[kind], expected)
    assert (found["k3"] - expected).abs().max() > 0.01
    torch.testing.assert_close(found["k1"], torch.zeros(7, dtype=torch.float64))


def test_a_straight_through_value_is_the_estimate_bit_by_bit() -> None:
    log_probs = torch.tensor([-0.3, -40.0, -7.25], requires_grad=True)
    reference = torch.tensor([-1.7, -0.001, -7.25])
    for kind in ("k1", "abs", "k2", "k3"):
        got = kl_penalty(log_probs, reference, f"{kind}+")
        assert torch.equal(got, kl_penalty(log_probs, reference, kind))
    bounded = straight_through(torch.full((3,), 10.0), log_probs, reference)
    (slope,) = torch.autograd.grad(bounded.sum(), log_probs)
    assert torch.equal(slope, (log_probs - reference).detach())


def test_a_users_own_function_with_and_without_plus(own_file: Path) -> None:
    log_probs = torch.tensor([-0.5, -3.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    for plus, slopes in (("", [0.75, 3.0]), ("+", [0.5, -1.0])):
        got = kl_penalty(log_probs, reference, f"{own_file}:cubic{plus}")
        assert got.tolist() == [0.125, -1.0]
        (gradient,) = torch.autograd.grad(got.sum(), log_probs)
        assert gradient.tolist() == slopes


def test_a_signature_that_declares_nothing_known_is_refused_with_the_one_expected(own_file: Path) -> None:
    with pytest.raises(ConfigError, match="'reference' is not a column") as caught:
        kl_estimator(f"{own_file}:misnamed")
    assert "ref_log_probs: (N) fp32, nats, of the reference" in str(caught.value.expected)
    with pytest.raises(ConfigError, match="must return an estimate per token"):
        kl_penalty(torch.zeros(2), torch.zeros(2), f"{own_file}:total")


@pytest.mark.equation("parts/apply_kl_penalty")
def test_a_kl_that_is_there_already_is_taken_off_like_an_estimated_one() -> None:
    mask, offsets = torch.tensor([False, True, True, False, True]), torch.tensor([0, 3, 5])
    scores = torch.tensor([0.0, 0.0, 1.0, 0.0, 2.0], dtype=torch.float64)
    kl = torch.tensor([9.0, 0.5, 0.25, 9.0, 1.0], dtype=torch.float64)
    got = penalise(scores, kl, mask, offsets, kl_coef=0.5)
    assert got.token_level_rewards.tolist() == [0.0, -0.25, 0.875, 0.0, 1.5]
    assert got.kl.item() == pytest.approx(((0.5 + 0.25) / 2 + 1.0) / 2)
    zeros = torch.zeros(5, dtype=torch.float64)
    same = apply_kl_penalty(scores, kl, zeros, mask, offsets, kind="k1", kl_coef=0.5)
    assert torch.equal(same.token_level_rewards, got.token_level_rewards)
    assert math.isclose(same.kl.item(), got.kl.item())
