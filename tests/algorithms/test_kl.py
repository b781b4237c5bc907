"""KL estimators, their straight-through forms and a user's own, the KL in the reward, and its coefficient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms import kl
from tandem.algorithms.kl import KL_KINDS, AdaptiveKLController, apply_kl_penalty, kl_penalty
from tandem.algorithms.kl_estimators import straight_through
from tandem.algorithms.registry import KL_ESTIMATORS, kl_estimator
from tandem.errors import ConfigError
from tests.algorithms.batches import batches, ragged_columns, responses

EQUATIONS = {
    "k1": (lambda d: d, lambda d: 1.0),
    "abs": (abs, lambda d: math.copysign(1.0, d)),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (lambda d: min(math.exp(min(-d, 20)) - 1 + max(d, -20), 10), lambda d: 1 - math.exp(-d)),
}
"""Value and slope of each estimator, as functions of log p - log q."""

ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def equations(kind):
    """Return value and slope of any kind; with a plus, the slope is that of k2."""
    plain = kind.removesuffix("+")
    value, slope = EQUATIONS[ALIASES.get(plain, plain)]
    return value, EQUATIONS["k2"][1] if kind.endswith("+") else slope


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def slope_of(log_probs, reference, kind):
    log_probs = log_probs.detach().requires_grad_()
    return torch.autograd.grad(kl_penalty(log_probs, reference, kind).sum(), log_probs)[0]


def test_every_kind_is_checked():
    assert KL_ESTIMATORS.names == tuple(sorted(EQUATIONS)) and KL_ESTIMATORS.aliases == ALIASES
    assert set(KL_KINDS) == {name + plus for name in (*EQUATIONS, *ALIASES) for plus in ("", "+")}


@pytest.mark.equation("kl/{kind}")
@pytest.mark.parametrize("kind", KL_KINDS)
@given(differences=st.lists(st.floats(-30, 30), min_size=1, max_size=20))
@settings(deadline=None, max_examples=40)
def test_values(kind, differences):
    d = double(*differences)
    got = kl_penalty(d - 1.5, torch.full_like(d, -1.5), kind)
    want = [equations(kind)[0](x) for x in (d - 1.5 + 1.5).tolist()]
    torch.testing.assert_close(got, double(*want), rtol=1e-9, atol=1e-9)


@pytest.mark.equation("kl/{kind}")
@pytest.mark.parametrize("kind", KL_KINDS)
def test_gradients(kind):
    log_probs, reference = double(-0.5, -3.0, -1.25, -0.1), double(-1.0, -2.0, -1.0, -2.1)
    want = [equations(kind)[1](d) for d in (log_probs - reference).tolist()]
    torch.testing.assert_close(slope_of(log_probs, reference, kind), double(*want))


@pytest.mark.equation("kl/k3")
def test_k3_is_exact_for_close_policies_and_bounded_for_distant_ones():
    d = torch.tensor([1e-4, -1e-4])
    got = kl_penalty(d, torch.zeros(2), "k3").double()
    torch.testing.assert_close(got, d.double().square() / 2, rtol=1e-3, atol=0)
    far = torch.tensor([-200.0, 200.0])
    assert kl_penalty(far, torch.zeros(2), "k3").tolist() == [10.0, 10.0]
    assert slope_of(far, torch.zeros(2), "k3").tolist() == [0.0, 0.0]


def test_a_straight_through_value_is_the_estimate_bit_by_bit():
    log_probs = torch.tensor([-0.3, -40.0, -7.25], requires_grad=True)
    reference = torch.tensor([-1.7, -0.001, -7.25])
    for kind in EQUATIONS:
        got = kl_penalty(log_probs, reference, f"{kind}+")
        assert torch.equal(got, kl_penalty(log_probs, reference, kind))
    bounded = straight_through(torch.full((3,), 10.0), log_probs, reference)
    (slope,) = torch.autograd.grad(bounded.sum(), log_probs)
    assert torch.equal(slope, (log_probs - reference).detach())


OWN_FILE = """
def cubic(log_probs, ref_log_probs):
    return (log_probs - ref_log_probs) ** 3

def misnamed(log_probs, reference): ...
def total(log_probs, ref_log_probs): return (log_probs - ref_log_probs).sum()
"""


def test_a_users_own_function(tmp_path):
    own = tmp_path / "my_kl.py"
    own.write_text(OWN_FILE)
    log_probs, reference = double(-0.5, -3.0), double(-1.0, -2.0)
    for plus, slopes in (("", [0.75, 3.0]), ("+", [0.5, -1.0])):
        kind = f"{own}:cubic{plus}"
        assert kl_penalty(log_probs, reference, kind).tolist() == [0.125, -1.0]
        assert slope_of(log_probs, reference, kind).tolist() == slopes
    with pytest.raises(ConfigError, match="'reference' is not a column"):
        kl_estimator(f"{own}:misnamed")
    with pytest.raises(ConfigError, match=r"shape \(\)"):
        kl_penalty(log_probs, reference, f"{own}:total")


def test_unknown_kind():
    with pytest.raises(ConfigError) as caught:
        kl_penalty(torch.zeros(1), torch.zeros(1), "low_var_k")
    assert caught.value.expected == "abs, k1, k2, k3" and "'low_var_kl'" in caught.value.remedy


@pytest.mark.equation("parts/apply_kl_penalty")
@pytest.mark.parametrize("kind", ["k1", "k3"])
@batches(30)
def test_kl_in_the_reward(kind, lengths, seed):
    columns = ragged_columns(lengths, seed, torch.float64)
    names = ("token_level_rewards", "log_probs", "old_log_probs", "response_mask", "offsets")
    scores, new, old, _, _ = given = [columns[name] for name in names]
    got = apply_kl_penalty(*given, kind=kind, kl_coef=0.3)
    want, means = scores.clone(), []
    for tokens in responses(columns):
        distances = [EQUATIONS[kind][0](new[t].item() - old[t].item()) for t in tokens]
        want[tokens] -= 0.3 * double(*distances)
        means.append(sum(distances) / max(len(distances), 1))
    torch.testing.assert_close(got.token_level_rewards, want, rtol=0, atol=1e-9)
    assert got.kl.item() == pytest.approx(sum(means) / len(means), abs=1e-9)


@pytest.mark.equation("parts/apply_kl_penalty")
def test_a_kl_that_is_there_already_is_taken_off_like_an_estimated_one():
    mask, offsets = torch.tensor([False, True, True, False, True]), torch.tensor([0, 3, 5])
    scores, distances = double(0, 0, 1, 0, 2), double(9, 0.5, 0.25, 9, 1)
    got = kl.penalise(scores, distances, mask, offsets, kl_coef=0.5)
    assert got.token_level_rewards.tolist() == [0.0, -0.25, 0.875, 0.0, 1.5]
    assert got.kl.item() == pytest.approx(((0.5 + 0.25) / 2 + 1.0) / 2)
    same = apply_kl_penalty(scores, distances, torch.zeros(5), mask, offsets, kind="k1", kl_coef=0.5)
    assert torch.equal(same.token_level_rewards, got.token_level_rewards)


@pytest.mark.equation("parts/AdaptiveKLController")
@pytest.mark.parametrize(("current", "error"), [(0.1, 0), (0.11, 0.1), (0.5, 0.2), (0, -0.2), (0.095, -0.05)])
def test_adaptive_controller(current, error):
    """The relative error of the KL is cut to 20 %, and 500 of 10,000 steps pass."""
    controller = AdaptiveKLController(init_kl_coef=0.2, target_kl=0.1, horizon=10_000)
    controller.update(current, n_steps=500)
    assert controller.value == pytest.approx(0.2 * (1 + error * 0.05))


def test_fixed_controller_and_a_controller_that_resumes():
    fixed = kl.FixedKLController(0.25)
    fixed.update(current_kl=99.0, n_steps=1000)
    assert fixed.value == 0.25
    controller, resumed = (AdaptiveKLController(0.2, 0.1, 100) for _ in range(2))
    controller.update(1.0, 30)
    resumed.load_state_dict(controller.state_dict())
    for each in (controller, resumed):
        each.update(0.01, 7)
    assert resumed.value == controller.value != 0.2


@pytest.mark.parametrize(("target", "horizon", "field"), [(0.0, 10, "target_kl"), (0.1, 0, "horizon")])
def test_adaptive_controller_refuses_what_it_would_divide_by(target, horizon, field):
    with pytest.raises(ConfigError, match=field):
        AdaptiveKLController(0.2, target, horizon)
