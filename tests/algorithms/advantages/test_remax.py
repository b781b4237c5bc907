from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.advantages.remax import remax

INPUTS = ("token_level_rewards", "reward_baselines", "response_mask", "offsets")


@pytest.mark.equation("advantages/remax")
@given(
    lengths=st.lists(st.integers(0, 300) | st.sampled_from([1, 4096]), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
    holes=st.sampled_from([0.0, 0.2]),
)
@settings(deadline=None, max_examples=30)
def test_rewards_to_come_less_the_greedy_responses(lengths, seed, holes, ragged_columns, rows) -> None:
    columns = ragged_columns(lengths, seed, torch.float64, holes)
    rewards, mask = columns["token_level_rewards"], columns["response_mask"]
    returns, advantages = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for i, row in enumerate(rows(columns)):
        to_come = 0.0
        for t in reversed(range(row.start, row.stop)):
            if mask[t]:
                to_come += rewards[t].item()
                returns[t] = to_come
                advantages[t] = to_come - columns["reward_baselines"][i]
    got = remax(*(columns[name] for name in INPUTS))
    torch.testing.assert_close(got.returns, returns, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got.advantages, advantages, rtol=1e-10, atol=1e-10)


@pytest.mark.equation("advantages/remax")
def test_by_hand() -> None:
    got = remax(
        torch.tensor([0.0, 1.0, 0.0, 2.0]),
        torch.tensor([2.5]),
        torch.tensor([False, True, False, True]),
        torch.tensor([0, 4]),
    )
    assert got.returns.tolist() == [0.0, 3.0, 0.0, 2.0]
    assert got.advantages.tolist() == [0.0, 0.5, 0.0, -0.5]
