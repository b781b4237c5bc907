from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.groups import group_statistics


@given(group=st.lists(st.integers(0, 6), min_size=1, max_size=40), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=80)
def test_against_numpy(group: list[int], seed: int) -> None:
    scores = torch.randn(len(group), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    got = group_statistics(scores, torch.tensor(group))
    for i, mine in enumerate(group):
        members = scores[torch.tensor(group) == mine].numpy()
        alone = len(members) == 1
        assert got.size[i] == len(members)
        assert got.mean[i].item() == pytest.approx(0.0 if alone else members.mean(), abs=1e-12)
        assert got.std[i].item() == pytest.approx(1.0 if alone else np.std(members, ddof=1), abs=1e-12)


@pytest.mark.parametrize("value", [0.1, 1.0, -7.3, 1e6 + 0.1])
def test_equal_scores_have_exactly_their_own_mean(value: float) -> None:
    scores = torch.full((7,), value, dtype=torch.float32).double()
    got = group_statistics(scores, torch.zeros(7, dtype=torch.int64))
    assert torch.equal(got.mean, scores)
    assert got.std.tolist() == [0.0] * 7


def test_no_sequences() -> None:
    empty = group_statistics(torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
    assert [len(part) for part in empty] == [0, 0, 0]
