from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.algorithms.advantages.optimal_token_baseline import (
    optimal_token_baseline,
    tir_optimal_token_baseline,
)

INPUTS = ("token_level_rewards", "old_log_probs", "sum_pi_squared", "response_mask", "offsets", "group")
WEIGHTS = "rollout_is_weights"


def slow(columns, rows, weighted, compact, zero_tail) -> tuple[Tensor, Tensor]:
    """Return advantages and returns (N) in float64, with a loop over the group for each token."""
    rewards, logs, squares, mask = (columns[name].tolist() for name in INPUTS[:4])
    rho, group = columns[WEIGHTS].tolist(), columns["group"].tolist()
    found = []  # for each sequence, a dict: position in the response -> (token, G, W)
    for row in rows:
        kept = [t for t in range(row.start, row.stop) if mask[t]]
        energy, table = 0.0, {}
        for n, t in enumerate(kept):
            w = 1 - 2 * math.exp(logs[t]) + squares[t]
            energy += w * (rho[t] ** 2 if weighted else 1)
            to_come = sum(rewards[s] for s in kept[n:])
            table[n if compact else t - kept[0]] = (t, to_come, energy)
        found.append(table)
    advantages, returns = (torch.zeros(len(mask), dtype=torch.float64) for _ in range(2))
    for i, table in enumerate(found):
        mine = [other for j, other in enumerate(found) if group[j] == group[i] and other]
        for place, (t, to_come, _) in table.items():
            there = [other[place] for other in mine if place in other]
            baseline = sum(g * w for _, g, w in there) / (sum(w for _, _, w in there) + 1e-8)
            if len(mine) == 1 or (zero_tail and len(there) == 1):
                baseline = 0.0
            returns[t], advantages[t] = to_come, to_come - baseline
    return advantages, returns


@pytest.mark.equation("advantages/{function.__name__}")
@pytest.mark.parametrize("function", [tir_optimal_token_baseline, optimal_token_baseline])
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
    holes=st.sampled_from([0.0, 0.3]),
    weighted=st.booleans(),
    zero_tail=st.booleans(),
)
@settings(deadline=None, max_examples=30)
def test_against_the_equation(
    function, lengths, seed, holes, weighted, zero_tail, ragged_columns, rows
) -> None:
    columns = ragged_columns(lengths, seed, torch.float64, holes)
    compact = function is tir_optimal_token_baseline
    rho = columns[WEIGHTS] if weighted else torch.ones_like(columns[WEIGHTS])
    got = function(*(columns[name] for name in INPUTS), rho, handle_zero_tail=zero_tail)
    advantages, returns = slow(columns, rows(columns), weighted, compact, zero_tail)
    torch.testing.assert_close(got.returns, returns, rtol=1e-10, atol=1e-10)
    # The random columns are not probabilities, so w may be negative here, and sums near 0 lose digits
    torch.testing.assert_close(got.advantages, advantages, rtol=1e-5, atol=1e-5)


@pytest.mark.equation("advantages/optimal_token_baseline")
def test_by_hand() -> None:
    """Two samples with pi = 1/2 and sum pi^2 = 1/2 everywhere, computed by hand.

    W_t is t/2. The second sample is one token longer. At the first two positions the two returns are 1 and 0
    and the weights are equal, so b = 1/2. At the third position b is 0.
    """
    lengths = torch.tensor([0, 2, 5])
    tokens = 5
    half = torch.full((tokens,), 0.5)
    inputs = (
        torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]),
        half.log(),
        half,
        torch.ones(tokens, dtype=torch.bool),
        lengths,
        torch.tensor([0, 0]),
    )
    got = optimal_token_baseline(*inputs, torch.ones(tokens))
    assert got.advantages.tolist() == pytest.approx([0.5, 0.5, -0.5, -0.5, 0.0])
    assert got.returns.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    double = optimal_token_baseline(
        *inputs, torch.tensor([2.0, 2.0, 1.0, 1.0, 1.0])
    )  # W of the first sample is four times as large
    assert double.advantages.tolist() == pytest.approx([0.2, 0.2, -0.8, -0.8, 0.0])


@pytest.mark.equation("advantages/optimal_token_baseline", "advantages/tir_optimal_token_baseline")
def test_turns_are_compared_token_by_token_only_in_the_form_for_several_turns() -> None:
    """The variant for several turns ignores tool tokens when it counts positions.

    The first sample waits two tokens for a tool. So its second response token is at position 3, or at
    position 1 if only response tokens count.
    """
    rewards = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    mask = torch.tensor([True, False, False, True, True, True])
    half = torch.full((6,), 0.5)
    places = torch.tensor([0, 4, 6]), torch.tensor([0, 0])
    inputs = rewards, half.log(), half, mask, *places, torch.ones(6)
    apart = optimal_token_baseline(*inputs).advantages
    assert apart.tolist() == pytest.approx([0.5, 0.0, 0.0, 1.0, -0.5, 0.0])
    together = tir_optimal_token_baseline(*inputs).advantages
    assert together.tolist() == pytest.approx([0.5, 0.0, 0.0, 0.5, -0.5, -0.5])
