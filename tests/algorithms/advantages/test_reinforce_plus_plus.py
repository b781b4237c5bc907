from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline

LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=8)
SEEDS = st.integers(0, 2**31)


@pytest.mark.equation("advantages/reinforce_plus_plus")
@given(
    lengths=LENGTHS,
    seed=SEEDS,
    gamma=st.sampled_from([0.0, 0.9, 1.0]) | st.floats(0, 1),
    holes=st.sampled_from([0.0, 0.2]),
)
@settings(deadline=None, max_examples=80)
def test_discounted_returns(lengths, seed, gamma, holes, ragged_columns, rows, whitened) -> None:
    columns = ragged_columns(lengths, seed, torch.float64, holes)
    rewards, mask = columns["token_level_rewards"], columns["response_mask"]
    want = torch.zeros_like(rewards)
    for row in rows(columns):
        running = 0.0
        for t in reversed(range(row.start, row.stop)):
            if mask[t]:
                running = rewards[t].item() + gamma * running
                want[t] = running
    got = reinforce_plus_plus(rewards, mask, columns["offsets"], gamma=gamma)
    torch.testing.assert_close(got.returns, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got.advantages, whitened(want, mask), rtol=1e-8, atol=1e-8)


@pytest.mark.equation("advantages/reinforce_plus_plus_baseline")
@given(lengths=LENGTHS, seed=SEEDS)
@settings(deadline=None, max_examples=60)
def test_group_baseline(lengths, seed, ragged_columns, rows, whitened) -> None:
    columns = ragged_columns(lengths, seed, torch.float64)
    rewards, mask, group = columns["token_level_rewards"], columns["response_mask"], columns["group"].tolist()
    spans = rows(columns)
    scores = [rewards[row].sum().item() for row in spans]
    centred = torch.zeros_like(rewards)
    for i, row in enumerate(spans):
        members = [score for score, mine in zip(scores, group, strict=True) if mine == group[i]]
        centred[row] = scores[i] - (sum(members) / len(members) if len(members) > 1 else 0.0)
    got = reinforce_plus_plus_baseline(rewards, mask, columns["offsets"], columns["group"])
    torch.testing.assert_close(got.advantages, whitened(centred, mask), rtol=1e-8, atol=1e-8)
    assert got.returns is got.advantages


def test_equal_rewards_give_exact_zeros() -> None:
    mask = torch.ones(6, dtype=torch.bool)
    rewards = torch.full((6,), 0.1)
    got = reinforce_plus_plus_baseline(rewards, mask, torch.arange(7), torch.tensor([0, 1, 0, 1, 0, 1]))
    assert got.advantages.tolist() == [0.0] * 6
    got = reinforce_plus_plus(rewards, mask, torch.arange(7))
    assert got.advantages.tolist() == [0.0] * 6


@pytest.mark.equation("advantages/reinforce_plus_plus")
def test_by_hand() -> None:
    got = reinforce_plus_plus(
        torch.tensor([0.0, 1.0, 9.0, 4.0]),
        torch.tensor([True, True, False, True]),
        torch.tensor([0, 4]),
        gamma=0.5,
    )
    assert got.returns.tolist() == [1.5, 3.0, 0.0, 4.0]
    returns = torch.tensor([1.5, 3.0, 4.0])
    want = (returns - returns.mean()) / returns.std()
    assert got.advantages[[0, 1, 3]].tolist() == pytest.approx(want.tolist(), rel=1e-5)
