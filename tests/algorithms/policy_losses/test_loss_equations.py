"""Numbers by hand of the policy losses, their metrics, and the way of options from the config to a loss."""

import math
from dataclasses import replace

import pytest
import torch

from tandem.algorithms.registry import POLICY_LOSSES as REGISTERED
from tandem.config.actor import ActorConfig, PolicyLossConfig
from tandem.config.tables import LOSS_KEYS, POLICY_LOSSES
from tandem.engines.train.base import Counts
from tandem.errors import ConfigError
from tandem.workers.loss_terms import configured_loss
from tandem.workers.losses import ActorLoss


def wide(*values):
    return torch.tensor(values, dtype=torch.float64)


def loss_of(name, now, old, advantages, **options):
    """Return losses, their gradient with respect to the current log-probs, and the metrics."""
    now = now.detach().clone().requires_grad_()
    columns = {"log_probs": now, "old_log_probs": old, "advantages": advantages}
    losses, metrics = REGISTERED.find(name)(columns, **options)
    return losses.detach(), torch.autograd.grad(losses.sum(), now, retain_graph=True)[0], metrics


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


NINE = [0.0] * 3, [-math.log(3), math.log(2), math.log(10)]  # ratios of 3, 1/2 and 1/10
RARE = [math.log(p) for p in (0.002, 0.7, 0.7, 0.3, 0.3)], [math.log(p) for p in (0.001, 0.5, 0.5, 0.5, 0.5)]
"""A rare token may double its probability; a likely token may not move as far, except towards the old one."""


@pytest.mark.equation("policy_losses/{name}")
@pytest.mark.parametrize(
    ("name", "log_probs", "advantages", "options", "slopes", "metric"),
    [
        ("cispo", NINE, [1, 1, 1], (1.0, 0.5), [-1.5, -0.5, -0.1], [1, 0, 0]),
        *(
            (name, RARE, [1, 1, -1, -1, 1], (bound, bound), [-2.0, 0.0, 1.4, 0.0, -0.6], [0, 1, 0, 1, 0])
            for name, bound in (("dppo_tv", 0.15), ("dppo_kl", 0.05))
        ),
    ],
)
def test_bounds_and_the_fraction_that_is_clipped(name, log_probs, advantages, options, slopes, metric):
    bounds = dict(zip(("clip_ratio_low", "clip_ratio_high"), options, strict=True))
    _, gradient, metrics = loss_of(name, *(wide(*each) for each in (*log_probs, advantages)), **bounds)
    torch.testing.assert_close(gradient, wide(*slopes))
    assert metrics["clip_fraction"].tolist() == metric


@pytest.mark.equation("policy_losses/sapo")
def test_the_gate_of_sapo_is_reported():
    ratio, advantages = wide(1, 3, 3, 0.2, 40), wide(1, 1, -1, 1, 1)
    _, gradient, metrics = loss_of("sapo", 0 * ratio, -ratio.log(), advantages, tau_neg=2.0)
    gate = gradient.abs() / ratio
    assert gate[0] == pytest.approx(1.0) and 1 > gate[1] > gate[2] > 0 and 0 < gate[3] < 1
    torch.testing.assert_close(metrics["gate"], gate, rtol=1e-4, atol=1e-6)


@pytest.mark.equation("policy_losses/vanilla", "policy_losses/bypass_mode")
@pytest.mark.parametrize("seed", range(20))
def test_the_metrics_of_vanilla_and_the_same_by_bypass_mode(seed):
    draw = torch.Generator().manual_seed(seed)
    now, old, advantages = torch.randn(3, 60, generator=draw, dtype=torch.float64)
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
