from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.advantages.rloo import rloo

INPUTS = ("token_level_rewards", "response_mask", "offsets", "group")


@pytest.mark.equation("advantages/rloo")
@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=12), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=80)
def test_each_sample_against_the_mean_of_the_others(lengths, seed, ragged_columns, rows) -> None:
    columns = ragged_columns(lengths, seed, torch.float64)
    spans, group = rows(columns), columns["group"].tolist()
    scores = [columns["token_level_rewards"][row].sum().item() for row in spans]
    got = rloo(*(columns[name] for name in INPUTS))
    for i, row in enumerate(spans):
        others = [scores[j] for j in range(len(spans)) if j != i and group[j] == group[i]]
        want = scores[i] - sum(others) / len(others) if others else scores[i]
        per_token = torch.where(columns["response_mask"][row], want, 0.0).double()
        torch.testing.assert_close(got.advantages[row], per_token, rtol=1e-6, atol=1e-6)
    assert got.returns is got.advantages


@pytest.mark.equation("advantages/rloo")
def test_by_hand() -> None:
    got = rloo(
        torch.tensor([0.0, 1.0, 2.0, 6.0, 5.0]),
        torch.tensor([False, True, True, True, True]),
        torch.tensor([0, 2, 3, 4, 5]),
        torch.tensor([1, 1, 1, 0]),
    )
    assert got.advantages.tolist() == [0.0, -3.0, -1.5, 4.5, 5.0]


def test_equal_rewards_give_exact_zeros() -> None:
    got = rloo(
        torch.full((5,), 0.3),
        torch.ones(5, dtype=torch.bool),
        torch.arange(6),
        torch.zeros(5, dtype=torch.int64),
    )
    assert got.advantages.tolist() == [0.0] * 5
