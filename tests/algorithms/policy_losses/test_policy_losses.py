"""Every policy loss, compared with its equations: values, gradients, and inputs that must not matter."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.aggregation import AGGREGATIONS
from tandem.algorithms.registry import POLICY_LOSSES
from tandem.config.actor import ActorConfig, PolicyLossConfig
from tandem.engines.train.base import Counts
from tandem.errors import ConfigError
from tandem.workers.losses import ActorLoss
from tests.algorithms.batches import SEEDS, chosen, ragged_columns, responses, rows
from tests.algorithms.policy_losses.slow_losses import SLOW, Token

LOSSES = tuple(SLOW)
OPTIONS = {
    **dict.fromkeys(("clip_ratio_low", "clip_ratio_high"), st.floats(0.01, 0.9)),
    **dict.fromkeys(("tau_pos", "tau_neg", "dro_beta", "ppo_kl_coef"), st.floats(0.1, 5.0)),
    "clip_ratio_c": st.floats(1.01, 5.0),
}
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=6) | st.sampled_from([[1], [4096], [0, 1000, 3]])


def test_every_loss_has_a_reference():
    assert {*SLOW, "bypass_mode"} == set(POLICY_LOSSES.names)  # bypass_mode is vanilla or reinforce


def drawn(lengths, seed, spread):
    """Return a batch with policies that differ by `spread` nats, and with some advantages of 0."""
    columns = ragged_columns(lengths, seed, torch.float64)
    generator, total = torch.Generator().manual_seed(seed), len(columns["log_probs"])
    columns["advantages"][torch.rand(total, generator=generator) < 0.1] = 0
    moved = spread * torch.randn(total, generator=generator, dtype=torch.float64)
    columns["old_log_probs"] = (columns["log_probs"] + moved).clamp(max=-1e-4)
    columns["selected_tokens"] = torch.rand(total, generator=generator) < 0.3
    return columns


def slow_loss(name, columns, weights, options):
    """Return the losses (N) of the response tokens and the gradient of their weighted sum; 0 elsewhere."""
    losses, gradient = torch.zeros_like(weights), torch.zeros_like(weights)
    names = ("log_probs", "old_log_probs", "advantages", "selected_tokens", "rollout_is_weights")
    for inside in responses(columns):
        values = zip(*(columns[n][inside].tolist() for n in names), strict=True)
        found, slopes = SLOW[name]([Token(*each) for each in values], **options)
        losses[inside] = torch.tensor(found, dtype=torch.float64)
        # With geo_mean, every token has the loss of its sequence.
        factors = weights[inside].sum() if name == "geo_mean" else weights[inside]
        gradient[inside] = factors * torch.tensor(slopes, dtype=torch.float64)
    return losses, gradient


@pytest.mark.equation("policy_losses/{name}")
@pytest.mark.parametrize("name", LOSSES)
@given(lengths=LENGTHS, seed=SEEDS, spread=st.sampled_from([0.05, 0.5, 3, 60]), data=st.data())
@settings(deadline=None, max_examples=30)
def test_values_and_gradients(name, lengths, seed, spread, data):
    columns, spec = drawn(lengths, seed, spread), POLICY_LOSSES.find(name)
    theirs = spec.selection.options if spec.selection else {}
    options = {n: data.draw(OPTIONS[n], label=n) for n in spec.options if n not in theirs}
    log_probs, inside = columns["log_probs"].requires_grad_(), columns["response_mask"]
    weights = torch.rand(len(log_probs), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights[~inside] = 0

    losses, metrics = spec(columns, **options)
    (gradient,) = torch.autograd.grad((weights * losses).sum(), log_probs)
    want_losses, want_gradient = slow_loss(name, columns, weights, options)
    torch.testing.assert_close(losses.detach()[inside], want_losses[inside], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-9, atol=1e-11)
    assert not any(metric.requires_grad for metric in metrics.values())
    assert all(metric.isfinite().all() for metric in metrics.values())


def actor_loss(name, mode="token-mean"):
    clips = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4} if name == "geo_mean" else {}
    config = ActorConfig(
        **{"loss_agg_mode": mode, "loss_scale_factor": 50.0, "entropy_coeff": 0.01, "use_kl_loss": True},
        policy_loss=PolicyLossConfig(loss_mode=name, **{"dro_beta": 0.3} if name == "dro" else {}),
        **clips,
    )
    return ActorLoss.from_config(config, recomputed=True)


def batch(name, columns):
    """Return a batch with the columns that the training loop adds before its updates."""
    spec = POLICY_LOSSES.find(name)
    if spec.selection:
        options = {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.2, "kl_cov_ratio": 0.1}
        columns["selected_tokens"] = spec.selection(columns, options)
    columns["ref_log_probs"] = columns["old_log_probs"] + 0.1
    columns["entropy"] = -columns["log_probs"].detach()
    return columns


def run(loss, columns, counts=None):
    """Return the loss, its gradient with respect to log_probs, and the metrics."""
    full = [len(tokens) for tokens in responses(columns) if tokens]
    counts = counts or Counts(tokens=sum(full), sequences=len(full))
    out = {name: columns[name].detach().clone().requires_grad_() for name in ("log_probs", "entropy")}
    value, metrics = loss(out, {name: columns[name] for name in loss.columns}, columns["offsets"], counts)
    return value.detach(), torch.autograd.grad(value, out["log_probs"])[0], metrics


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_and_the_order_of_samples_do_not_matter(name, mode):
    """Losses, gradients and metrics of the parts add up to those of the whole mini-batch."""
    lengths, loss = [17, 1, 30, 0, 23, 5, 9, 12], actor_loss(name, mode)
    for seed in range(3):
        columns = batch(name, drawn(lengths, seed, 0.4))
        full = [len(tokens) for tokens in responses(columns) if tokens]
        counts = Counts(tokens=sum(full), sequences=len(full))
        whole, gradient, metrics = run(loss, columns)
        order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
        parts = [chosen(columns, order[first:last]) for first, last in pairwise([0, 1, 2, 5, 8])]
        results = [run(loss, part, counts) for part in parts]
        torch.testing.assert_close(sum(r[0] for r in results), whole, rtol=1e-11, atol=1e-14)
        wanted = torch.cat([gradient[rows(columns)[i]] for i in order])
        torch.testing.assert_close(torch.cat([r[1] for r in results]), wanted, rtol=1e-11, atol=1e-16)
        merged = metrics.merged([r[2] for r in results]).to_floats()
        assert merged == pytest.approx(metrics.to_floats(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_what_stands_outside_the_mask_does_not_matter(name):
    columns, loss = batch(name, drawn([12, 4, 0, 20], 3, 0.4)), actor_loss(name)
    mask = columns["response_mask"]
    want, want_gradient, want_metrics = run(loss, columns)
    for poison in (torch.nan, torch.inf, -torch.inf, 1e30):
        poisoned = {
            n: torch.where(mask, c.detach(), poison) if c.shape == mask.shape and c.is_floating_point() else c
            for n, c in columns.items()
        }
        value, gradient, metrics = run(loss, poisoned)
        assert torch.equal(value, want) and torch.equal(gradient, want_gradient)
        assert metrics.to_floats() == want_metrics.to_floats()
    assert want_gradient[~mask].abs().max() == 0


@pytest.mark.equation("policy_losses/{name}")
@pytest.mark.parametrize("name", LOSSES)
def test_the_first_update_is_the_policy_gradient(name):
    """If each sequence has one advantage, every loss has the gradient -A, except for Clip-Cov's tokens."""
    columns = batch(name, ragged_columns([9, 14, 3], 5, torch.float64))
    mask, advantages = columns["response_mask"], torch.zeros(26, dtype=torch.float64)
    for row, advantage in zip(rows(columns), (1.5, -0.7, 0.0), strict=True):
        advantages[row] = torch.where(mask[row], advantage, 0.0)
    columns["advantages"] = advantages
    loss = ActorLoss(actor_loss(name).terms[:1], "token-sum", 1.0, recomputed=False)
    _, gradient, metrics = run(loss, columns)
    silent = columns["selected_tokens"] if name == "clip_cov" else torch.zeros_like(mask)
    torch.testing.assert_close(gradient, torch.where(mask & ~silent, -advantages, 0.0), rtol=1e-12, atol=0)
    assert metrics.to_floats()["ppo_kl"] == 0 == metrics.to_floats().get("clip_fraction", 0)


@pytest.mark.parametrize("name", LOSSES)
def test_single_precision_stays_close(name):
    wide = batch(name, drawn([4096, 700], 1, 0.3))
    narrow = {n: c.detach().float() if c.is_floating_point() else c for n, c in wide.items()}
    want, want_gradient, _ = run(actor_loss(name), wide)
    got, gradient, _ = run(actor_loss(name), narrow)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)
    apart = (gradient.double() - want_gradient).abs() > 1e-5 * want_gradient.abs().max()
    assert apart.float().mean() < 1e-3  # a token on a bound may be rounded to the other side


@pytest.mark.parametrize("option", ["tau_pos", "tau_neg", "dro_beta", "clip_ratio_c"])
def test_numbers_that_make_no_sense_are_refused(option):
    ones = dict.fromkeys(("log_probs", "old_log_probs", "advantages"), -torch.ones(2))
    for name in (name for name in LOSSES if option in POLICY_LOSSES.find(name).options):
        value = 1.0 if name == "vanilla" else 0.0
        with pytest.raises(ConfigError) as caught:
            POLICY_LOSSES.find(name)(ones, **{option: value})
        assert option in caught.value.field and caught.value.got == value
