"""The token selections of Clip-Cov and KL-Cov, and how a loss declares its selection."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.policy_losses.clip_cov import covariances_between
from tandem.algorithms.policy_losses.kl_cov import kl_cov, largest_covariances
from tandem.algorithms.registry import PolicyLossSpec, Registry, policy_loss
from tandem.algorithms.selection import selects_tokens, token_covariances
from tandem.errors import ConfigError


def slow_covariances(columns) -> list[float]:
    """Return the covariances of the response tokens, in order."""
    inside = columns["response_mask"].nonzero().squeeze(1).tolist()
    pairs = [(columns["old_log_probs"][i].item(), columns["advantages"][i].item()) for i in inside]
    log_mean = sum(log_prob for log_prob, _ in pairs) / max(len(pairs), 1)
    mean = sum(advantage for _, advantage in pairs) / max(len(pairs), 1)
    return [(log_prob - log_mean) * (advantage - mean) for log_prob, advantage in pairs]


@pytest.mark.equation("policy_losses/clip_cov", "policy_losses/kl_cov")
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    ratio=st.floats(1e-4, 1.0),
)
@settings(deadline=None, max_examples=40)
def test_choices(lengths, seed, ratio, ragged_columns) -> None:
    columns = ragged_columns(lengths, seed, torch.float64)
    mask = columns["response_mask"]
    for name in ("old_log_probs", "advantages"):
        columns[name] = torch.where(mask, columns[name], torch.nan)
    given = (columns["old_log_probs"], columns["advantages"], mask)
    want = slow_covariances(columns)
    found = token_covariances(*given)
    assert found[mask].tolist() == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert (found[~mask] == -torch.inf).all()

    count = min(max(int(ratio * len(want)), 1), len(want))
    chosen = largest_covariances(*given, kl_cov_ratio=ratio)
    assert not chosen[~mask].any() and int(chosen.sum()) == count
    assert sorted(found[chosen].tolist()) == pytest.approx(sorted(want)[len(want) - count :], abs=1e-12)

    low, high = 0.1, 1.0
    between = covariances_between(*given, clip_cov_ratio=ratio, clip_cov_lb=low, clip_cov_ub=high)
    assert not between[~mask].any()
    assert all(low < value < high for value in found[between].tolist())
    assert int(between.sum()) == min(
        max(int(ratio * len(want)), 1), sum(low < value < high for value in want)
    )
    again = covariances_between(*given, clip_cov_ratio=ratio, clip_cov_lb=low, clip_cov_ub=high)
    assert torch.equal(between, again)


@pytest.mark.equation("policy_losses/clip_cov")
def test_every_candidate_is_as_likely_to_be_chosen() -> None:
    """Over many batches with the tokens in random order, all candidates are selected equally often."""
    generator = torch.Generator().manual_seed(0)
    tokens, rounds = 50, 2000
    hits = torch.zeros(tokens)
    mask = torch.ones(tokens, dtype=torch.bool)
    for _ in range(rounds):
        order = torch.randperm(tokens, generator=generator)
        log_probs = torch.linspace(-3, -1, tokens)
        advantages = torch.where(torch.arange(tokens) % 2 == 0, 1.0, -1.0)
        options = {"clip_cov_ratio": 0.1, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}
        hits[order[covariances_between(log_probs[order], advantages[order], mask, **options)]] += 1
    assert hits.sum() == rounds * 5
    assert (hits / rounds - 0.1).abs().max() < 0.03


@pytest.mark.parametrize("choice", [largest_covariances, covariances_between])
def test_a_share_that_is_none_is_refused(choice) -> None:
    name = "kl_cov_ratio" if choice is largest_covariances else "clip_cov_ratio"
    with pytest.raises(ConfigError, match=name):
        choice(torch.zeros(2), torch.zeros(2), torch.ones(2, dtype=torch.bool), **{name: 0.0})


def test_a_loss_takes_the_options_of_what_chooses_for_it() -> None:
    spec = policy_loss("kl_cov")
    assert spec.selection is not None and dict(spec.selection.options) == {"kl_cov_ratio": 0.0002}
    assert dict(spec.options) == {"ppo_kl_coef": 0.1, "kl_cov_ratio": 0.0002}
    now, old = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.5])
    columns = {
        "log_probs": now,
        "old_log_probs": old,
        "advantages": torch.tensor([1.0, -1.0]),
        "selected_tokens": torch.tensor([True, False]),
        "response_mask": torch.ones(2, dtype=torch.bool),
    }
    losses, _ = spec(columns, ppo_kl_coef=2.0, kl_cov_ratio=0.5)
    torch.testing.assert_close(
        losses, torch.tensor([1.0, 0.0]) + torch.tensor([-1.0, 1.0]) * (now - old).exp()
    )
    chosen = spec.selection(columns, {"ppo_kl_coef": 2.0, "kl_cov_ratio": 0.5})
    assert chosen.tolist() == [True, False]


def test_a_loss_and_its_choice_that_do_not_fit_are_refused() -> None:
    registry = Registry(PolicyLossSpec)

    def unchosen(log_probs, selected_tokens): ...

    with pytest.raises(ConfigError, match=r"selected_tokens.*selects_tokens"):
        registry.register("unchosen")(unchosen)

    def choose(advantages, response_mask, *, weight=1.0): ...

    @selects_tokens(choose)
    def unread(log_probs): ...

    with pytest.raises(ConfigError, match=r"selected_tokens.*selects_tokens"):
        registry.register("unread")(unread)

    @selects_tokens(choose)
    def twice(log_probs, selected_tokens, *, weight=1.0): ...

    with pytest.raises(ConfigError, match=r"choose.*'weight'"):
        registry.register("twice")(twice)
    with pytest.raises(ConfigError, match="'log_probs' is not a column"):
        selects_tokens(lambda log_probs: log_probs)(kl_cov)

    @selects_tokens(lambda response_mask: response_mask.long())
    def numbers(log_probs, selected_tokens): ...

    registry.register("numbers")(numbers)
    selection = registry.find("numbers").selection
    assert selection is not None
    with pytest.raises(ConfigError, match="bool tensor of shape"):
        selection({"response_mask": torch.ones(2, dtype=torch.bool)}, {})
