from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.algorithms.advantages.gae import gae

INPUTS = ("token_level_rewards", "values", "response_mask", "offsets")


def slow_gae(columns: dict[str, Tensor], rows: list[slice], gamma: float, lam: float) -> Tensor:
    """Return the advantages (N) before whitening, in float64.

    Tokens outside the mask do not change the values that are carried to earlier tokens.
    """
    rewards, values = columns["token_level_rewards"].tolist(), columns["values"].tolist()
    mask = columns["response_mask"].tolist()
    out = torch.zeros(len(mask), dtype=torch.float64)
    for row in rows:
        next_value = next_advantage = 0.0
        for t in reversed(range(row.start, row.stop)):
            if mask[t]:
                delta = rewards[t] + gamma * next_value - values[t]
                next_advantage = delta + gamma * lam * next_advantage
                next_value = values[t]
                out[t] = next_advantage
    return out


@pytest.mark.equation("advantages/gae")
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
    gamma=st.sampled_from([0.0, 0.99, 1.0]) | st.floats(0, 1),
    lam=st.sampled_from([0.0, 0.95, 1.0]) | st.floats(0, 1),
    holes=st.sampled_from([0.0, 0.2, 0.9, 1.0]),
)
@settings(deadline=None, max_examples=120)
def test_against_the_recurrence(lengths, seed, gamma, lam, holes, ragged_columns, rows, whitened) -> None:
    columns = ragged_columns(lengths, seed, torch.float64, holes)
    mask = columns["response_mask"]
    got = gae(*(columns[name] for name in INPUTS), gamma=gamma, lam=lam)
    want = slow_gae(columns, rows(columns), gamma, lam)
    returns = torch.where(mask, want + columns["values"], 0)
    torch.testing.assert_close(got.returns, returns, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got.advantages, whitened(want, mask), rtol=1e-8, atol=1e-8)


@pytest.mark.equation("advantages/gae")
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.5), (0.99, 1.0), (1.0, 0.9), (1.0, 0.0)])
def test_float32_at_32768_steps(gamma, lam, ragged_columns, rows, whitened) -> None:
    columns = ragged_columns([32768, 17, 4096], seed=3)
    mask = columns["response_mask"]
    assert mask.sum() > 20_000
    got = gae(*(columns[name] for name in INPUTS), gamma=gamma, lam=lam)
    want = slow_gae(columns, rows(columns), gamma, lam)
    returns = torch.where(mask, want + columns["values"], 0)
    assert (got.returns - returns).abs().max() <= 2e-6 * returns.abs().max()
    assert (got.advantages - whitened(want, mask)).abs().max() <= 1e-5


@pytest.mark.equation("advantages/gae")
def test_by_hand_with_an_observation_in_between() -> None:
    """Two response tokens, an observation of a tool and one response token, computed by hand."""
    got = gae(
        torch.tensor([0.0, 0.0, 0.0, 5.0, 1.0]),
        torch.tensor([9.0, 0.5, 0.25, 9.0, 0.5]),
        torch.tensor([False, True, True, False, True]),
        torch.tensor([0, 5]),
        gamma=0.5,
        lam=1.0,
    )
    # A_4 = 1 - 0.5; A_2 = 0.5*0.5 - 0.25 + 0.5*A_4; A_1 = 0.5*0.25 - 0.5 + 0.5*A_2
    advantages = torch.tensor([-0.25, 0.25, 0.5])
    torch.testing.assert_close(got.returns, torch.tensor([0.0, 0.25, 0.5, 0.0, 1.0]))
    want = (advantages - advantages.mean()) / advantages.std()
    torch.testing.assert_close(got.advantages, torch.tensor([0.0, want[0], want[1], 0.0, want[2]]))


def test_inputs_are_left_alone(ragged_columns) -> None:
    columns = ragged_columns([40, 30], seed=0)
    before = {name: columns[name].clone() for name in INPUTS}
    gae(*(columns[name] for name in INPUTS), gamma=0.9, lam=0.9)
    for name in INPUTS:
        torch.testing.assert_close(columns[name], before[name], rtol=0, atol=0, equal_nan=True)


def test_no_response_tokens_at_all() -> None:
    got = gae(torch.zeros(3), torch.ones(3), torch.zeros(3, dtype=torch.bool), torch.tensor([0, 1, 3]))
    assert got.advantages.tolist() == got.returns.tolist() == [0.0, 0.0, 0.0]
