"""Statements of the papers about their losses, in forms that the code does not use."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tandem.algorithms.aggregation import aggregate
from tandem.algorithms.policy_losses.cispo import cispo
from tandem.algorithms.policy_losses.dppo_kl import dppo_kl
from tandem.algorithms.policy_losses.dppo_tv import dppo_tv
from tandem.algorithms.policy_losses.dro import dro
from tandem.algorithms.policy_losses.geo_mean import geo_mean
from tandem.algorithms.policy_losses.gspo import gspo
from tandem.algorithms.policy_losses.sapo import sapo
from tandem.config.actor import ActorConfig, PolicyLossConfig
from tandem.config.tables import LOSS_KEYS, POLICY_LOSSES
from tandem.engines.train.base import Counts
from tandem.workers.loss_terms import configured_loss
from tandem.workers.losses import ActorLoss

LENGTHS = [5, 1, 9, 0, 12]
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
MASK = torch.ones(sum(LENGTHS), dtype=torch.bool)


def policies(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return current and old log-probs, and one advantage per sequence."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(len(MASK), generator=generator, dtype=torch.float64) * 3
    now = (old + 0.3 * torch.randn(len(MASK), generator=generator, dtype=torch.float64)).requires_grad_()
    return now, old, torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)


def sequence_mean(losses: torch.Tensor) -> torch.Tensor:
    return aggregate(losses, MASK, OFFSETS, mode="seq-mean-token-mean", tokens=len(MASK), sequences=4)


@pytest.mark.equation("policy_losses/gspo")
def test_one_advantage_per_sequence_makes_gspo_the_sequence_objective() -> None:
    """GSPO equals eq. 5 of the paper, the mean of min(s A, clip(s) A), with autograd through s."""
    for seed in range(5):
        now, old, advantages = policies(seed)
        terms = []
        for i, (start, stop) in enumerate(pairwise(OFFSETS)):
            if stop > start:
                s = ((now - old)[start:stop].sum() / (stop - start)).exp()
                terms.append(torch.minimum(s * advantages[i], s.clamp(0.9, 1.1) * advantages[i]))
        want = -torch.stack(terms).mean()
        per_token = advantages.repeat_interleave(OFFSETS.diff())
        options = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}
        found = sequence_mean(gspo(now, old, per_token, MASK, OFFSETS, **options)[0])
        torch.testing.assert_close(found, want, rtol=1e-12, atol=0)
        expected = torch.autograd.grad(want, now)[0]
        torch.testing.assert_close(torch.autograd.grad(found, now)[0], expected, rtol=1e-10, atol=1e-14)


@pytest.mark.equation("policy_losses/gspo")
def test_a_sequence_far_from_the_old_policy_has_no_gradient_under_gspo() -> None:
    """With mean log-ratios of 9, 11, 11 and 300 nats, only the first sequence has a gradient.

    The third sequence has a positive advantage, so that PPO's clip already removes its gradient.
    """
    moved = torch.tensor([8.0, 10.0, 11.0, 11.0, 301.0, 299.0], dtype=torch.float64)
    now = torch.full((6,), -1.0, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([-2.0, -2.0, -2.0, 2.0, -2.0, -2.0], dtype=torch.float64)
    offsets = torch.tensor([0, 2, 3, 4, 6])
    losses, _ = gspo(now, now.detach() - moved, advantages, torch.ones(6, dtype=torch.bool), offsets)
    (gradient,) = torch.autograd.grad(losses.sum(), now)
    assert gradient.tolist() == [pytest.approx(2 * math.exp(9))] * 2 + [0] * 4
    assert losses.tolist() == pytest.approx(
        [2 * math.exp(9)] * 2 + [2 * math.exp(10), -2.4] + [2 * math.exp(10)] * 2
    )


@pytest.mark.equation("policy_losses/geo_mean")
def test_the_geometric_mean_is_the_root_of_the_product() -> None:
    """GMPO equals the published (prod |min(rho A, clip(rho) A)|)^(1/T) sgn(A).

    Autograd goes through the product.
    """
    for seed in range(5):
        now, old, advantages = policies(seed)
        terms = []
        for i, (start, stop) in enumerate(pairwise(OFFSETS)):
            if stop > start:
                rho = (now - old)[start:stop].exp()
                clipped = rho.clamp(math.exp(-0.2), math.exp(0.2))
                worse = torch.minimum(rho * advantages[i], clipped * advantages[i])
                terms.append(worse.abs().prod() ** (1 / int(stop - start)) * advantages[i].sign())
        want = -torch.stack(terms).mean()
        per_token = advantages.repeat_interleave(OFFSETS.diff())
        found = sequence_mean(geo_mean(now, old, per_token, torch.ones_like(old), MASK, OFFSETS)[0])
        torch.testing.assert_close(found, want, rtol=1e-10, atol=0)
        expected = torch.autograd.grad(want, now)[0]
        torch.testing.assert_close(torch.autograd.grad(found, now)[0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.equation("policy_losses/geo_mean")
def test_the_importance_weight_of_a_sequence_is_the_geometric_mean_of_its_tokens() -> None:
    """Token weights of 4, 1 and 2 weigh their sequence by 2; a weight of 0 counts as 1e-10.

    The test calls the loss as the engine does.
    """
    columns = {
        "old_log_probs": torch.tensor([-1.0, -2.0, -3.0, -1.0, -1.0], dtype=torch.float64),
        "advantages": torch.tensor([1.5, 1.5, 1.5, -1.0, -1.0], dtype=torch.float64),
        "rollout_is_weights": torch.tensor([4.0, 1.0, 2.0, 0.0, 1.0], dtype=torch.float64),
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
def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    now = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old = now.detach() - torch.tensor([3.0, 0.5, 0.1]).log()
    losses, metrics = cispo(now, old, torch.ones(3), clip_ratio_low=1.0, clip_ratio_high=0.5)
    (gradient,) = torch.autograd.grad(losses.sum(), now)
    torch.testing.assert_close(gradient, torch.tensor([-1.5, -0.5, -0.1]))
    assert metrics["clip_fraction"].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.equation("policy_losses/sapo")
def test_sapo_fades_and_sooner_for_negative_advantages() -> None:
    ratio = torch.tensor([1.0, 3.0, 3.0, 0.2, 40.0])
    now = torch.zeros(5, requires_grad=True)
    losses, metrics = sapo(now, -ratio.log(), torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0]), tau_neg=2.0)
    gradient = torch.autograd.grad(losses.sum(), now)[0].abs() / ratio
    assert gradient[0] == pytest.approx(1.0)
    assert 1 > gradient[1] > gradient[2] > 0 and 0 < gradient[3] < 1
    assert gradient[4] < 1e-6
    torch.testing.assert_close(metrics["gate"], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.equation("policy_losses/dro")
def test_dro_comes_to_rest_where_the_log_ratio_is_advantage_over_beta() -> None:
    advantages = torch.tensor([0.4, -0.2], dtype=torch.float64)
    old = torch.tensor([-2.0, -1.0], dtype=torch.float64)
    now = (old + advantages / 0.5).requires_grad_()
    losses, _ = dro(now, old, advantages, dro_beta=0.5)
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), now)[0], torch.zeros(2).double())


@pytest.mark.equation("policy_losses/dppo_tv", "policy_losses/dppo_kl")
def test_dppo_masks_probabilities_and_not_ratios() -> None:
    """A rare token may double its probability, a likely token may not move as far.

    Tokens that move back towards the old policy always learn.
    """
    old = torch.tensor([0.001, 0.5, 0.5, 0.5, 0.5]).log()
    now = torch.tensor([0.002, 0.7, 0.7, 0.3, 0.3]).log().requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    for loss, bound in ((dppo_tv, 0.15), (dppo_kl, 0.05)):
        losses, metrics = loss(now, old, advantages, clip_ratio_low=bound, clip_ratio_high=bound)
        assert metrics["clip_fraction"].tolist() == [0, 1, 0, 1, 0]
        (gradient,) = torch.autograd.grad(losses.sum(), now)
        want = -advantages * torch.tensor([2.0, 0.0, 1.4, 0.0, 0.6])
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-6)


@pytest.mark.equation("policy_losses/dppo_kl")
def test_dppo_kl_is_that_of_two_coins() -> None:
    p, q = 0.9, 0.4
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    now, old = torch.tensor([p]).double().log(), torch.tensor([q]).double().log()
    for bound, outside in ((kl * 1.0001, 0.0), (kl * 0.9999, 1.0)):
        _, metrics = dppo_kl(now, old, torch.ones(1), clip_ratio_high=bound)
        assert metrics["clip_fraction"].item() == outside


@pytest.mark.parametrize("name", sorted({*POLICY_LOSSES} - {"bypass_mode"}))
def test_each_key_of_the_config_reaches_its_loss(name: str) -> None:
    changed = {option: 0.37 + 0.01 * i for i, option in enumerate(POLICY_LOSSES[name])}
    changed |= {"clip_ratio_c": 2.5} if "clip_ratio_c" in changed else {}
    keys = {LOSS_KEYS[option]: value for option, value in changed.items()}
    section = {key.split(".")[1]: value for key, value in keys.items() if "." in key}
    actor = {key: value for key, value in keys.items() if "." not in key}
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name, **section), **actor)
    spec, options = configured_loss(config)
    assert spec.name == name and options == changed
