"""The token selections of Clip-Cov and KL-Cov, and how a loss declares its selection."""

import pytest
import torch
from hypothesis import strategies as st

from tandem.algorithms.policy_losses.clip_cov import covariances_between
from tandem.algorithms.policy_losses.kl_cov import kl_cov, largest_covariances
from tandem.algorithms.registry import PolicyLossSpec, Registry, policy_loss
from tandem.algorithms.selection import selects_tokens, token_covariances
from tandem.errors import ConfigError
from tests.algorithms.batches import batches, ragged_columns


@pytest.mark.equation("policy_losses/clip_cov", "policy_losses/kl_cov")
@batches(40, most=6, ratio=st.floats(1e-4, 1.0))
def test_choices(lengths, seed, ratio):
    columns = ragged_columns(lengths, seed, torch.float64)
    mask = columns["response_mask"]
    pair = [torch.where(mask, columns[name], torch.nan) for name in ("old_log_probs", "advantages")]
    centred = [
        [x - sum(inside) / len(inside) for x in inside] for inside in (part[mask].tolist() for part in pair)
    ]
    want = [log_prob * advantage for log_prob, advantage in zip(*centred, strict=True)]
    found = token_covariances(*pair, mask)
    assert found[mask].tolist() == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert (found[~mask] == -torch.inf).all()

    share = max(int(ratio * len(want)), 1)
    largest = largest_covariances(*pair, mask, kl_cov_ratio=ratio)
    count = min(share, len(want))
    assert not largest[~mask].any() and int(largest.sum()) == count
    assert sorted(found[largest].tolist()) == pytest.approx(sorted(want)[len(want) - count :], abs=1e-12)

    bounds = {"clip_cov_ratio": ratio, "clip_cov_lb": 0.1, "clip_cov_ub": 1.0}
    between, again = (covariances_between(*pair, mask, **bounds) for _ in range(2))
    assert not between[~mask].any() and torch.equal(between, again)
    assert all(0.1 < value < 1.0 for value in found[between].tolist())
    assert int(between.sum()) == min(share, sum(0.1 < value < 1.0 for value in want))


@pytest.mark.equation("policy_losses/clip_cov")
def test_every_candidate_is_as_likely_to_be_chosen():
    """Over many batches with the tokens in random order, all candidates are selected equally often."""
    generator = torch.Generator().manual_seed(0)
    tokens, rounds = 50, 2000
    hits, mask = torch.zeros(tokens), torch.ones(tokens, dtype=torch.bool)
    log_probs = torch.linspace(-3, -1, tokens)
    advantages = torch.where(torch.arange(tokens) % 2 == 0, 1.0, -1.0)
    options = {"clip_cov_ratio": 0.1, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}
    for _ in range(rounds):
        order = torch.randperm(tokens, generator=generator)
        hits[order[covariances_between(log_probs[order], advantages[order], mask, **options)]] += 1
    assert hits.sum() == rounds * 5
    assert (hits / rounds - 0.1).abs().max() < 0.03


@pytest.mark.parametrize(
    ("choice", "name"), [(largest_covariances, "kl_cov_ratio"), (covariances_between, "clip_cov_ratio")]
)
def test_a_share_that_is_none_is_refused(choice, name):
    with pytest.raises(ConfigError, match=name):
        choice(torch.zeros(2), torch.zeros(2), torch.ones(2, dtype=torch.bool), **{name: 0.0})


def test_a_loss_takes_the_options_of_what_chooses_for_it():
    spec = policy_loss("kl_cov")
    assert dict(spec.selection.options) == {"kl_cov_ratio": 0.0002}
    assert dict(spec.options) == {"ppo_kl_coef": 0.1, "kl_cov_ratio": 0.0002}
    now, old, advantages = torch.tensor([[-1.0, -2.0], [-1.5, -2.5], [1.0, -1.0]])
    columns = {
        **{"log_probs": now, "old_log_probs": old, "advantages": advantages},
        "selected_tokens": torch.tensor([True, False]),
        "response_mask": torch.ones(2, dtype=torch.bool),
    }
    losses, _ = spec(columns, ppo_kl_coef=2.0, kl_cov_ratio=0.5)
    torch.testing.assert_close(losses, torch.tensor([1.0, 0.0]) - advantages * (now - old).exp())
    assert spec.selection(columns, {"ppo_kl_coef": 2.0, "kl_cov_ratio": 0.5}).tolist() == [True, False]


def choose(advantages, response_mask, *, weight=1.0): ...
def unchosen(log_probs, selected_tokens): ...
def unread(log_probs): ...
def twice(log_probs, selected_tokens, *, weight=1.0): ...
def numbers(log_probs, selected_tokens): ...


def test_a_loss_and_its_choice_that_do_not_fit_are_refused():
    registry = Registry(PolicyLossSpec)
    for loss, telling in (
        (unchosen, r"selected_tokens.*selects_tokens"),
        (selects_tokens(choose)(unread), r"selected_tokens.*selects_tokens"),
        (selects_tokens(choose)(twice), r"choose.*'weight'"),
    ):
        with pytest.raises(ConfigError, match=telling):
            registry.register(loss.__name__)(loss)
    with pytest.raises(ConfigError, match="'log_probs' is not a column"):
        selects_tokens(lambda log_probs: log_probs)(kl_cov)
    registry.register("numbers")(selects_tokens(lambda response_mask: response_mask.long())(numbers))
    with pytest.raises(ConfigError, match="bool tensor of shape"):
        registry.find("numbers").selection({"response_mask": torch.ones(2, dtype=torch.bool)}, {})
