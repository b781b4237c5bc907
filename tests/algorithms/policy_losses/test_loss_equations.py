"""Statements of the papers about their losses, in forms that the code does not use, and numbers by hand."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tandem.algorithms.aggregation import aggregate
from tandem.algorithms.registry import POLICY_LOSSES as REGISTERED
from tandem.config.actor import ActorConfig, PolicyLossConfig
from tandem.config.tables import LOSS_KEYS, POLICY_LOSSES
from tandem.engines.train.base import Counts
from tandem.errors import ConfigError
from tandem.workers.loss_terms import configured_loss
from tandem.workers.losses import ActorLoss

LENGTHS = [5, 1, 9, 0, 12]
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
MASK = torch.ones(sum(LENGTHS), dtype=torch.bool)


def wide(*values):
    return torch.tensor(values, dtype=torch.float64)


def loss_of(name, now, old, advantages, offsets=OFFSETS, **options):
    """Return losses, their gradient with respect to the current log-probs, and the metrics."""
    now = now.detach().clone().requires_grad_()
    columns = {"log_probs": now, "old_log_probs": old, "advantages": advantages, "offsets": offsets}
    more = {
        "response_mask": torch.ones(len(old), dtype=torch.bool),
        "rollout_is_weights": torch.ones_like(old),
    }
    losses, metrics = REGISTERED.find(name)(columns | more, **options)
    return losses.detach(), torch.autograd.grad(losses.sum(), now, retain_graph=True)[0], metrics


def gspo_term(moved, advantage):
    """Eq. 5: min(s A, clip(s) A)."""
    s = moved.mean().exp()
    return torch.minimum(s * advantage, s.clamp(0.9, 1.1) * advantage)


def geo_mean_term(moved, advantage):
    """As published: (prod |min(rho A, clip(rho) A)|)^(1/T) sgn(A)."""
    rho = moved.exp()
    worse = torch.minimum(rho * advantage, rho.clamp(math.exp(-0.1), math.exp(0.1)) * advantage)
    return worse.abs().prod() ** (1 / len(moved)) * advantage.sign()


@pytest.mark.equation("policy_losses/{name}")
@pytest.mark.parametrize(("name", "term"), [("gspo", gspo_term), ("geo_mean", geo_mean_term)])
@pytest.mark.parametrize("seed", range(5))
def test_one_advantage_per_sequence_gives_the_sequence_objective(name, term, seed):
    """The loss is minus the mean of the sequences' terms, with autograd through these."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(len(MASK), generator=generator, dtype=torch.float64) * 3
    now = (old + 0.3 * torch.randn(len(MASK), generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    spans = [slice(a, b) for a, b in pairwise(OFFSETS.tolist())]
    terms = [
        term((now - old)[row], a) for row, a in zip(spans, advantages, strict=True) if row.stop > row.start
    ]
    want = -torch.stack(terms).mean()
    columns = {"log_probs": now, "old_log_probs": old, "response_mask": MASK, "offsets": OFFSETS}
    columns["advantages"] = advantages.repeat_interleave(OFFSETS.diff())
    columns["rollout_is_weights"] = torch.ones_like(old)
    losses, _ = REGISTERED.find(name)(columns, clip_ratio_low=0.1, clip_ratio_high=0.1)
    found = aggregate(losses, MASK, OFFSETS, mode="seq-mean-token-mean", tokens=len(MASK), sequences=4)
    torch.testing.assert_close(found, want, rtol=1e-10, atol=0)
    expected = torch.autograd.grad(want, now)[0]
    torch.testing.assert_close(torch.autograd.grad(found, now)[0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.equation("policy_losses/gspo")
def test_a_sequence_far_from_the_old_policy_has_no_gradient_under_gspo():
    """With mean log-ratios of 9, 11, 11 and 300 nats, only the first sequence has a gradient.

    The third sequence has a positive advantage, so that PPO's clip already removes its gradient.
    """
    now, moved, first = wide(*[-1.0] * 6), wide(8, 10, 11, 11, 301, 299), 2 * math.exp(9)
    offsets, advantages = torch.tensor([0, 2, 3, 4, 6]), wide(-2, -2, -2, 2, -2, -2)
    losses, gradient, _ = loss_of("gspo", now, now - moved, advantages, offsets)
    assert gradient.tolist() == pytest.approx([first] * 2 + [0] * 4)
    assert losses.tolist() == pytest.approx([first] * 2 + [2 * math.exp(10), -2.4] + [2 * math.exp(10)] * 2)


@pytest.mark.equation("policy_losses/geo_mean")
def test_the_importance_weight_of_a_sequence_is_the_geometric_mean_of_its_tokens():
    """Token weights of 4, 1 and 2 weigh their sequence by 2; a weight of 0 counts as 1e-10."""
    columns = {
        "old_log_probs": wide(-1.0, -2.0, -3.0, -1.0, -1.0),
        "advantages": wide(1.5, 1.5, 1.5, -1.0, -1.0),
        "rollout_is_weights": wide(4.0, 1.0, 2.0, 0.0, 1.0),
        "response_mask": torch.ones(5, dtype=torch.bool),
    }
    config = ActorConfig(policy_loss={"loss_mode": "geo_mean"}, loss_agg_mode="seq-mean-token-mean")
    loss = replace(ActorLoss.from_config(config, recomputed=True), weighted=True)
    out = {name: columns["old_log_probs"].clone().requires_grad_() for name in ("log_probs", "entropy")}
    found, _ = loss(out, columns, torch.tensor([0, 3, 5]), Counts(tokens=5, sequences=2))
    assert found.item() == pytest.approx((-1.5 * 2 + 1e-5) / 2, rel=1e-12)
    (gradient,) = torch.autograd.grad(found, out["log_probs"])
    assert gradient.tolist() == pytest.approx([-0.5] * 3 + [1e-5 / 4] * 2, rel=1e-12)


@pytest.mark.equation("policy_losses/cispo")
def test_cispo_bounds_the_weight_and_keeps_the_gradient():
    old, bounds = -1.0 - wide(3.0, 0.5, 0.1).log(), {"clip_ratio_low": 1.0, "clip_ratio_high": 0.5}
    _, gradient, metrics = loss_of("cispo", wide(-1, -1, -1), old, wide(1, 1, 1), **bounds)
    torch.testing.assert_close(gradient, wide(-1.5, -0.5, -0.1))
    assert metrics["clip_fraction"].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.equation("policy_losses/sapo")
def test_sapo_fades_and_sooner_for_negative_advantages():
    ratio = torch.tensor([1.0, 3.0, 3.0, 0.2, 40.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0])
    _, gradient, metrics = loss_of("sapo", torch.zeros(5), -ratio.log(), advantages, tau_neg=2.0)
    gradient = gradient.abs() / ratio
    assert gradient[0] == pytest.approx(1.0)
    assert 1 > gradient[1] > gradient[2] > 0 and 0 < gradient[3] < 1
    assert gradient[4] < 1e-6
    torch.testing.assert_close(metrics["gate"], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.equation("policy_losses/dro")
def test_dro_comes_to_rest_where_the_log_ratio_is_advantage_over_beta():
    advantages, old = wide(0.4, -0.2), wide(-2, -1)
    _, gradient, _ = loss_of("dro", old + advantages / 0.5, old, advantages, dro_beta=0.5)
    torch.testing.assert_close(gradient, wide(0, 0))


@pytest.mark.equation("policy_losses/{name}")
@pytest.mark.parametrize(("name", "bound"), [("dppo_tv", 0.15), ("dppo_kl", 0.05)])
def test_dppo_masks_probabilities_and_not_ratios(name, bound):
    """A rare token may double its probability, a likely token may not move as far.

    Tokens that move back towards the old policy always learn.
    """
    old, now = torch.tensor([[0.001, 0.5, 0.5, 0.5, 0.5], [0.002, 0.7, 0.7, 0.3, 0.3]]).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    bounds = {"clip_ratio_low": bound, "clip_ratio_high": bound}
    _, gradient, metrics = loss_of(name, now, old, advantages, **bounds)
    assert metrics["clip_fraction"].tolist() == [0, 1, 0, 1, 0]
    want = -advantages * torch.tensor([2.0, 0.0, 1.4, 0.0, 0.6])
    torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-6)


@pytest.mark.equation("policy_losses/dppo_kl")
def test_dppo_kl_is_that_of_two_coins():
    p, q = 0.9, 0.4
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    for bound, outside in ((kl * 1.0001, 0.0), (kl * 0.9999, 1.0)):
        _, _, metrics = loss_of("dppo_kl", wide(p).log(), wide(q).log(), wide(1), clip_ratio_high=bound)
        assert metrics["clip_fraction"].item() == outside


@pytest.mark.equation("policy_losses/vanilla")
def test_each_bound_of_vanilla_by_hand():
    ratios, advantages = wide(1.5, 0.5, 1.5, 0.5, 10).log(), wide(1, 1, -1, -1, -1)
    bounds = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 4.0}
    losses, _, metrics = loss_of("vanilla", ratios, torch.zeros_like(ratios), advantages, **bounds)
    torch.testing.assert_close(losses, wide(-1.3, -0.5, 1.5, 0.9, 4.0))
    assert metrics["clip_fraction"].tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert metrics["clip_fraction_lower"].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.equation("policy_losses/vanilla", "policy_losses/bypass_mode")
@pytest.mark.parametrize("seed", range(20))
def test_the_metrics_of_vanilla_and_the_same_by_bypass_mode(seed):
    now, old, advantages = torch.randn(
        3, 60, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    low, high, c = 0.01 + 0.04 * seed, 0.9 - 0.04 * seed, 1.01 + 0.2 * seed
    bounds = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": c}
    losses, gradient, metrics = loss_of("vanilla", now, old, advantages, **bounds)
    ratio = (now - old).exp()
    plain, clipped = -ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages
    dual = (advantages < 0) & (torch.maximum(plain, clipped) > -c * advantages)
    assert torch.equal(metrics["clip_fraction"], (clipped > plain).double())
    assert torch.equal(metrics["clip_fraction_lower"], dual.double())
    torch.testing.assert_close(metrics["ppo_kl"], old - now)
    same, slope, observed = loss_of("bypass_mode", now, old, advantages, **bounds)
    assert torch.equal(same, losses) and torch.equal(slope, gradient) and set(observed) == set(metrics)


@pytest.mark.equation("policy_losses/bypass_mode")
def test_bypass_modes_reinforce_is_the_score_function_times_the_advantage():
    now, old, advantages = torch.randn(3, 40, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    losses, gradient, observed = loss_of("bypass_mode", now, old, advantages, loss_type="reinforce")
    torch.testing.assert_close(losses, -advantages * now)
    assert torch.equal(gradient, -advantages)
    assert torch.equal(observed["ppo_kl"], old - now) and not observed["ppo_kl"].requires_grad
    with pytest.raises(ConfigError) as caught:
        loss_of("bypass_mode", now, old, advantages, loss_type="dpo")
    assert caught.value.got == "dpo"


def test_far_apart_policies_stay_finite():
    now, old = torch.tensor([[0.0, -500.0], [-500.0, 0.0]])
    losses, gradient, _ = loss_of("vanilla", now, old, torch.tensor([-1.0, 1.0]))
    assert losses.tolist() == pytest.approx([3.0, 0.0], abs=1e-8) and gradient.isfinite().all()


@pytest.mark.parametrize("name", sorted({*POLICY_LOSSES} - {"bypass_mode"}))
def test_each_key_of_the_config_reaches_its_loss(name):
    changed = {option: 0.37 + 0.01 * i for i, option in enumerate(POLICY_LOSSES[name])}
    changed |= {"clip_ratio_c": 2.5} if "clip_ratio_c" in changed else {}
    keys = {LOSS_KEYS[option]: value for option, value in changed.items()}
    section = {key.split(".")[1]: value for key, value in keys.items() if "." in key}
    actor = {key: value for key, value in keys.items() if "." not in key}
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name, **section), **actor)
    spec, options = configured_loss(config)
    assert spec.name == name and options == changed
