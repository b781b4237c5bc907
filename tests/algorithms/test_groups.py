import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.groups import group_statistics
from tests.algorithms.batches import SEEDS


@given(group=st.lists(st.integers(0, 6), max_size=40), seed=SEEDS)
@settings(deadline=None, max_examples=80)
def test_against_numpy(group, seed):
    scores = torch.randn(len(group), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    groups = torch.tensor(group, dtype=torch.int64)
    got = group_statistics(scores, groups)
    assert [len(part) for part in got] == [len(group)] * 3
    for i, mine in enumerate(group):
        members = scores[groups == mine].numpy()
        mean, std = (members.mean(), np.std(members, ddof=1)) if len(members) > 1 else (0.0, 1.0)
        assert got.size[i] == len(members)
        assert (got.mean[i].item(), got.std[i].item()) == pytest.approx((mean, std), abs=1e-12)


@pytest.mark.parametrize("value", [0.1, 1.0, -7.3, 1e6 + 0.1])
def test_equal_scores_have_exactly_their_own_mean(value):
    scores = torch.full((7,), value, dtype=torch.float32).double()
    got = group_statistics(scores, torch.zeros(7, dtype=torch.int64))
    assert torch.equal(got.mean, scores)
    assert got.std.tolist() == [0.0] * 7
