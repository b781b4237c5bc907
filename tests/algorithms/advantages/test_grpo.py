from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.algorithms.advantages.grpo import grpo

INPUTS = ("token_level_rewards", "response_mask", "offsets", "group")


def slow_grpo(columns: dict[str, Tensor], rows: list[slice], by_std: bool) -> Tensor:
    rewards, group = columns["token_level_rewards"].double(), columns["group"].tolist()
    scores = np.array([rewards[row].sum().item() for row in rows])
    out = torch.zeros(len(rewards), dtype=torch.float64)
    for i, row in enumerate(rows):
        members = np.array([s for s, g in zip(scores, group, strict=True) if g == group[i]])
        mean, std = (members.mean(), members.std(ddof=1)) if len(members) > 1 else (0.0, 1.0)
        advantage = (scores[i] - mean) / (std + 1e-6) if by_std else scores[i] - mean
        out[row] = torch.where(columns["response_mask"][row], advantage, 0.0)
    return out


@pytest.mark.equation("advantages/grpo")
@pytest.mark.parametrize("by_std", [True, False])
@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=12), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=60)
def test_against_the_equation(by_std, lengths, seed, ragged_columns, rows) -> None:
    columns = ragged_columns(lengths, seed)
    got = grpo(*(columns[name] for name in INPUTS), norm_adv_by_std_in_grpo=by_std)
    assert got.advantages.dtype == torch.float32
    want = slow_grpo(columns, rows(columns), by_std)
    torch.testing.assert_close(got.advantages.double(), want, rtol=1e-6, atol=1e-5)
    assert got.returns is got.advantages


def outcome(rewards: list[float], group: list[int], **options: bool) -> list[float]:
    """Return the columns of sequences with one response token each."""
    count = len(rewards)
    mask = torch.ones(count, dtype=torch.bool)
    result = grpo(torch.tensor(rewards), mask, torch.arange(count + 1), torch.tensor(group), **options)
    return result.advantages.tolist()


@pytest.mark.equation("advantages/grpo")
def test_by_hand_with_interleaved_groups() -> None:
    half = 0.5**0.5
    assert outcome([1.0, 0.0, 0.0, 3.0], [0, 1, 0, 1]) == pytest.approx([half, -half, -half, half], rel=1e-5)
    assert outcome([1.0, 0.0, 0.0, 3.0], [0, 1, 0, 1], norm_adv_by_std_in_grpo=False) == [
        0.5,
        -1.5,
        -0.5,
        1.5,
    ]


def test_equal_rewards_give_exact_zeros() -> None:
    assert outcome([0.1] * 7, [0] * 7) == [0.0] * 7


@pytest.mark.equation("advantages/grpo")
def test_a_group_of_one_keeps_its_reward() -> None:
    assert outcome([0.75], [0]) == pytest.approx([0.75], rel=1e-5)
    assert outcome([0.75], [0], norm_adv_by_std_in_grpo=False) == [0.75]
