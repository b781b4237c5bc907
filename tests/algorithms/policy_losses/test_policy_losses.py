"""Every policy loss, compared with its equations: values, gradients, and inputs that must not matter."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.algorithms.aggregation import AGGREGATIONS
from tandem.algorithms.registry import POLICY_LOSSES, PolicyLossSpec
from tandem.config.actor import ActorConfig, PolicyLossConfig
from tandem.engines.train.base import Counts
from tandem.errors import ConfigError
from tandem.workers.losses import ActorLoss
from tests.algorithms.policy_losses.slow_losses import SLOW, Token

LOSSES = tuple(SLOW)
GIVEN = {"dro": {"dro_beta": 0.3}, "geo_mean": {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}}
"""Options other than the defaults."""

bounds = st.floats(0.01, 0.9)
positive = st.floats(0.1, 5.0)
OPTIONS = {
    "clip_ratio_low": bounds,
    "clip_ratio_high": bounds,
    "clip_ratio_c": st.floats(1.01, 5.0),
    "tau_pos": positive,
    "tau_neg": positive,
    "dro_beta": positive,
    "ppo_kl_coef": positive,
}
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=6) | st.sampled_from(
    [[1], [4096], [0, 1000, 3], [1, 1, 1, 1]]
)


def test_every_loss_has_a_reference() -> None:
    assert {*SLOW, "bypass_mode"} == set(POLICY_LOSSES.names)  # bypass_mode has its own test file


def as_log_probs(columns: dict[str, Tensor], spread: float, seed: int) -> dict[str, Tensor]:
    """Set policies that differ by `spread` nats, and set some advantages to 0."""
    generator = torch.Generator().manual_seed(seed)
    advantages = columns["advantages"]
    advantages[torch.rand(len(advantages), generator=generator) < 0.1] = 0
    moved = spread * torch.randn(len(advantages), generator=generator, dtype=torch.float64)
    columns["old_log_probs"] = (columns["log_probs"] + moved).clamp(max=-1e-4)
    columns["selected_tokens"] = torch.rand(len(advantages), generator=generator) < 0.3
    return columns


def slow_loss(
    name: str, columns: dict[str, Tensor], rows: list[slice], weights: Tensor, options: dict[str, float]
) -> tuple[Tensor, Tensor]:
    """Return the losses (N) of the response tokens and the gradient of their weighted sum; 0 elsewhere."""
    losses, gradient = torch.zeros_like(weights), torch.zeros_like(weights)
    names = ("log_probs", "old_log_probs", "advantages", "selected_tokens", "rollout_is_weights")
    for row in rows:
        inside = columns["response_mask"][row].nonzero().squeeze(1) + row.start
        tokens = [
            Token(*values) for values in zip(*(columns[n][inside].tolist() for n in names), strict=True)
        ]
        found, slopes = SLOW[name](tokens, **options)
        losses[inside] = torch.tensor(found, dtype=torch.float64)
        shared = name == "geo_mean"  # every token has the loss of its sequence
        factors = weights[inside].sum() if shared else weights[inside]
        gradient[inside] = factors * torch.tensor(slopes, dtype=torch.float64)
    return losses, gradient


@pytest.mark.equation("policy_losses/{name}")
@pytest.mark.parametrize("name", LOSSES)
@given(
    lengths=LENGTHS, seed=st.integers(0, 2**31), spread=st.sampled_from([0.05, 0.5, 3, 60]), data=st.data()
)
@settings(deadline=None, max_examples=30)
def test_values_and_gradients(name, lengths, seed, spread, data, ragged_columns, rows) -> None:
    columns = as_log_probs(ragged_columns(lengths, seed, torch.float64), spread, seed)
    spec = POLICY_LOSSES.find(name)
    theirs = spec.selection.options if spec.selection else {}
    options = {n: data.draw(OPTIONS[n], label=n) for n in spec.options if n not in theirs}
    log_probs = columns["log_probs"].requires_grad_()
    weights = torch.rand(len(log_probs), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights[~columns["response_mask"]] = 0

    losses, metrics = spec(columns, **options)
    (gradient,) = torch.autograd.grad((weights * losses).sum(), log_probs)
    want_losses, want_gradient = slow_loss(name, columns, rows(columns), weights, options)
    inside = columns["response_mask"]
    torch.testing.assert_close(losses.detach()[inside], want_losses[inside], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-9, atol=1e-11)
    assert not any(metric.requires_grad for metric in metrics.values())
    assert all(metric.isfinite().all() for metric in metrics.values())


def actor_loss(name: str, mode: str = "token-mean", *, recomputed: bool = True) -> ActorLoss:
    own = GIVEN.get(name, {})
    section = {n: value for n, value in own.items() if n in PolicyLossConfig.model_fields}
    actor = {n: value for n, value in own.items() if n not in section}
    config = ActorConfig(
        policy_loss=PolicyLossConfig(loss_mode=name, **section),
        loss_agg_mode=mode,
        loss_scale_factor=50.0,
        entropy_coeff=0.01,
        use_kl_loss=True,
        **actor,
    )
    return ActorLoss.from_config(config, recomputed=recomputed)


def batch(name: str, columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch with the columns that the training loop adds before its updates."""
    spec: PolicyLossSpec = POLICY_LOSSES.find(name)
    if spec.selection:
        options = {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.2, "kl_cov_ratio": 0.1}
        columns["selected_tokens"] = spec.selection(columns, options)
    columns["ref_log_probs"] = columns["old_log_probs"] + 0.1
    columns["entropy"] = -columns["log_probs"].detach()
    return columns


def run(loss: ActorLoss, columns: dict[str, Tensor], counts: Counts) -> tuple[Tensor, Tensor, dict]:
    """Return the loss, its gradient with respect to log_probs, and the metrics."""
    out = {name: columns[name].detach().clone().requires_grad_() for name in ("log_probs", "entropy")}
    given = {name: columns[name] for name in loss.columns}
    value, metrics = loss(out, given, columns["offsets"], counts)
    return value.detach(), torch.autograd.grad(value, out["log_probs"])[0], metrics


def counts_of(columns: dict[str, Tensor], rows: list[slice]) -> Counts:
    mask = columns["response_mask"]
    return Counts(tokens=int(mask.sum()), sequences=sum(bool(mask[row].any()) for row in rows))


def rows_of(columns: dict[str, Tensor], picked: list[int]) -> dict[str, Tensor]:
    """Return the batch of the given sequences, in the given order."""
    offsets = columns["offsets"].tolist()
    spans = [torch.arange(offsets[i], offsets[i + 1]) for i in picked]
    index = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)
    total = offsets[-1]
    part = {
        name: column.detach()[index]
        for name, column in columns.items()
        if column.ndim == 1 and len(column) == total and name not in ("offsets", "group")
    }
    lengths = torch.tensor([len(span) for span in spans], dtype=torch.int64)
    part["offsets"] = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    return part


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_and_the_order_of_samples_do_not_matter(name, mode, ragged_columns, rows) -> None:
    """Losses, gradients and metrics of the parts add up to those of the whole mini-batch."""
    lengths = [17, 1, 30, 0, 23, 5, 9, 12]
    for seed in range(3):
        columns = batch(name, as_log_probs(ragged_columns(lengths, seed, torch.float64), 0.4, seed))
        counts = counts_of(columns, rows(columns))
        loss = actor_loss(name, mode)
        whole, gradient, metrics = run(loss, columns, counts)

        order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
        cuts = [0, 1, 2, 5, 8]
        parts = [order[first:last] for first, last in pairwise(cuts)]
        results = [run(loss, rows_of(columns, part), counts) for part in parts]
        torch.testing.assert_close(sum(r[0] for r in results), whole, rtol=1e-11, atol=1e-14)
        offsets = columns["offsets"].tolist()
        index = torch.cat([torch.arange(offsets[i], offsets[i + 1]) for i in order])
        found = torch.cat([r[1] for r in results])
        torch.testing.assert_close(found, gradient[index], rtol=1e-11, atol=1e-16)
        merged = metrics.merged([r[2] for r in results]).to_floats()
        assert merged == pytest.approx(metrics.to_floats(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_what_stands_outside_the_mask_does_not_matter(name, ragged_columns, rows) -> None:
    """Values outside the mask have no effect, even NaN and infinity, and get gradient 0."""
    columns = batch(name, as_log_probs(ragged_columns([12, 4, 0, 20], 3, torch.float64), 0.4, 3))
    mask, counts = columns["response_mask"], counts_of(columns, rows(columns))
    loss = actor_loss(name)
    want, want_gradient, want_metrics = run(loss, columns, counts)
    for poison in (torch.nan, torch.inf, -torch.inf, 1e30):
        poisoned = {
            n: torch.where(mask, c.detach(), poison) if c.shape == mask.shape and c.is_floating_point() else c
            for n, c in columns.items()
        }
        value, gradient, metrics = run(loss, poisoned, counts)
        assert torch.equal(value, want) and torch.equal(gradient, want_gradient)
        assert metrics.to_floats() == want_metrics.to_floats()
    assert want_gradient[~mask].abs().max() == 0


@pytest.mark.equation("policy_losses/{name}")
@pytest.mark.parametrize("name", LOSSES)
def test_the_first_update_is_the_policy_gradient(name, ragged_columns, rows) -> None:
    """If the policy has not moved and each sequence has one advantage, every loss has the gradient -A.

    The only exception are the tokens that Clip-Cov selects.
    """
    columns = batch(name, ragged_columns([9, 14, 3], 5, torch.float64))
    mask, advantages = columns["response_mask"], torch.zeros(26, dtype=torch.float64)
    for row, advantage in zip(rows(columns), (1.5, -0.7, 0.0), strict=True):
        advantages[row] = torch.where(mask[row], advantage, 0.0)
    columns["advantages"] = advantages
    loss = actor_loss(name, "token-sum", recomputed=False)
    loss = ActorLoss(loss.terms[:1], "token-sum", 1.0, recomputed=False)
    _, gradient, metrics = run(loss, columns, counts_of(columns, rows(columns)))
    silent = columns["selected_tokens"] if name == "clip_cov" else torch.zeros_like(mask)
    torch.testing.assert_close(gradient, torch.where(mask & ~silent, -advantages, 0.0), rtol=1e-12, atol=0)
    assert metrics.to_floats()["ppo_kl"] == 0
    assert metrics.to_floats().get("clip_fraction", 0) == 0


@pytest.mark.parametrize("name", LOSSES)
def test_single_precision_stays_close(name, ragged_columns, rows) -> None:
    """For long sequences, fp32 gives the same numbers as fp64, to fp32 precision."""
    wide = batch(name, as_log_probs(ragged_columns([4096, 700], 1, torch.float64), 0.3, 1))
    narrow = {n: c.detach().float() if c.is_floating_point() else c for n, c in wide.items()}
    counts = counts_of(wide, rows(wide))
    want, want_gradient, _ = run(actor_loss(name), wide, counts)
    got, gradient, _ = run(actor_loss(name), narrow, counts)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)
    apart = (gradient.double() - want_gradient).abs() > 1e-5 * want_gradient.abs().max()
    assert apart.float().mean() < 1e-3  # a token on a bound may be rounded to the other side


@pytest.mark.parametrize("option", ["tau_pos", "tau_neg", "dro_beta", "clip_ratio_c"])
def test_numbers_that_make_no_sense_are_refused(option: str) -> None:
    names = [name for name in LOSSES if option in POLICY_LOSSES.find(name).options]
    ones = dict.fromkeys(("log_probs", "old_log_probs", "advantages"), -torch.ones(2))
    for name in names:
        with pytest.raises(ConfigError, match=option) as caught:
            POLICY_LOSSES.find(name)(ones, **{option: 0.0})
        assert caught.value.got == 0.0
