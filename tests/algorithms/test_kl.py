from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.kl import (
    KL_KINDS,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    kl_penalty,
)
from tandem.errors import ConfigError

FORMULAS = {
    "k1": lambda d: d,
    "kl": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "mse": lambda d: d * d / 2,
    "k3": lambda d: min(math.exp(min(max(-d, -20), 20)) - 1 + min(max(d, -20), 20), 10),
    "low_var_kl": lambda d: min(math.exp(min(max(-d, -20), 20)) - 1 + min(max(d, -20), 20), 10),
}
SLOPES = {
    "k1": lambda d: 1.0,
    "kl": lambda d: 1.0,
    "abs": lambda d: math.copysign(1.0, d),
    "k2": lambda d: d,
    "mse": lambda d: d,
    "k3": lambda d: 1 - math.exp(-d),
    "low_var_kl": lambda d: 1 - math.exp(-d),
}
FORMULAS |= {f"{kind}+": formula for kind, formula in FORMULAS.items()}
SLOPES |= {f"{kind}+": SLOPES["k2"] for kind in SLOPES}


def test_every_kind_is_checked() -> None:
    assert set(FORMULAS) == set(KL_KINDS)


@pytest.mark.equation("kl/{kind}")
@pytest.mark.parametrize("kind", KL_KINDS)
@given(differences=st.lists(st.floats(-30, 30), min_size=1, max_size=20))
@settings(deadline=None, max_examples=40)
def test_values(kind: str, differences: list[float]) -> None:
    d = torch.tensor(differences, dtype=torch.float64)
    got = kl_penalty(d - 1.5, torch.full_like(d, -1.5), kind)
    want = [FORMULAS[kind](x) for x in (d - 1.5 + 1.5).tolist()]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.equation("kl/{kind}")
@pytest.mark.parametrize("kind", KL_KINDS)
def test_gradients(kind: str) -> None:
    log_probs = torch.tensor([-0.5, -3.0, -1.25, -0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -2.0, -1.0, -2.1], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(kl_penalty(log_probs, reference, kind).sum(), log_probs)
    want = [SLOPES[kind](d) for d in (log_probs - reference).tolist()]
    torch.testing.assert_close(gradient, torch.tensor(want, dtype=torch.float64))


@pytest.mark.equation("kl/k3")
def test_k3_is_exact_for_close_policies() -> None:
    d = torch.tensor([1e-4, -1e-4])
    want = d.double().square() / 2
    torch.testing.assert_close(kl_penalty(d, torch.zeros(2), "k3").double(), want, rtol=1e-3, atol=0)


def test_k3_is_bounded_and_its_gradient_finite() -> None:
    log_probs = torch.tensor([-200.0, 200.0], requires_grad=True)
    got = kl_penalty(log_probs, torch.zeros(2), "k3")
    assert got.tolist() == [10.0, 10.0]
    assert torch.autograd.grad(got.sum(), log_probs)[0].tolist() == [0.0, 0.0]


def test_unknown_kind() -> None:
    with pytest.raises(ConfigError, match="KL estimator") as caught:
        kl_penalty(torch.zeros(1), torch.zeros(1), "low_var_k")
    assert caught.value.expected == "abs, k1, k2, k3"
    assert caught.value.remedy == "did you mean 'low_var_kl'?"


@pytest.mark.equation("parts/apply_kl_penalty")
@pytest.mark.parametrize("kind", ["k1", "k3"])
@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=8), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_kl_in_the_reward(kind, lengths, seed, ragged_columns, rows) -> None:
    columns = ragged_columns(lengths, seed, torch.float64)
    scores, mask = columns["token_level_rewards"], columns["response_mask"]
    new, old = columns["log_probs"], columns["old_log_probs"]
    got = apply_kl_penalty(scores, new, old, mask, columns["offsets"], kind=kind, kl_coef=0.3)
    means = []
    for row in rows(columns):
        total = 0.0
        for t in range(row.start, row.stop):
            kl = FORMULAS[kind](new[t].item() - old[t].item()) if mask[t] else 0.0
            assert got.token_level_rewards[t].item() == pytest.approx(scores[t].item() - 0.3 * kl, abs=1e-9)
            total += kl
        means.append(total / max(int(mask[row].sum()), 1))
    assert got.kl.item() == pytest.approx(sum(means) / len(means), abs=1e-9)


def test_fixed_controller() -> None:
    controller = FixedKLController(0.25)
    controller.update(current_kl=99.0, n_steps=1000)
    assert controller.value == 0.25


@pytest.mark.equation("parts/AdaptiveKLController")
@pytest.mark.parametrize(
    ("current", "factor"),
    [
        (0.1, 1.0),
        (0.11, 1 + 0.1 * 0.05),
        (0.5, 1 + 0.2 * 0.05),
        (0.0, 1 - 0.2 * 0.05),
        (0.095, 1 - 0.05 * 0.05),
    ],
)
def test_adaptive_controller(current: float, factor: float) -> None:
    controller = AdaptiveKLController(init_kl_coef=0.2, target_kl=0.1, horizon=10_000)
    controller.update(current, n_steps=500)
    assert controller.value == pytest.approx(0.2 * factor)


def test_controllers_resume_where_they_were() -> None:
    controller = AdaptiveKLController(0.2, 0.1, 100)
    controller.update(1.0, 30)
    resumed = AdaptiveKLController(0.2, 0.1, 100)
    resumed.load_state_dict(controller.state_dict())
    controller.update(0.01, 7)
    resumed.update(0.01, 7)
    assert resumed.value == controller.value != 0.2


@pytest.mark.parametrize(("target", "horizon", "field"), [(0.0, 10, "target_kl"), (0.1, 0, "horizon")])
def test_adaptive_controller_refuses_what_it_would_divide_by(target: float, horizon: int, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        AdaptiveKLController(0.2, target, horizon)
