from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.responses import Responses


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
    holes=st.sampled_from([0.0, 0.05, 0.9]),
)
@settings(deadline=None, max_examples=60)
def test_response_tokens_follow_each_other(lengths, seed, holes, ragged_columns, rows, whitened) -> None:
    columns = ragged_columns(lengths, seed, torch.float64, holes)
    mask, values = columns["response_mask"], columns["values"]
    tokens, spans = Responses.of(mask, columns["offsets"]), rows(columns)
    taken = tokens.take(values)
    for i, row in enumerate(spans):
        mine = taken[tokens.offsets[i] : tokens.offsets[i + 1]]
        inside = values[row][mask[row]]
        if tokens.indices is None:
            assert len(mine) == row.stop - row.start
            assert not mine[~mask[row]].any()
            mine = mine[mask[row]]
        assert torch.equal(mine, inside)
    added = tokens.put(tokens.add_(taken.clone(), values))
    torch.testing.assert_close(added, torch.where(mask, 2 * values, 0), rtol=0, atol=0)
    torch.testing.assert_close(tokens.put(taken.clone()), torch.where(mask, values, 0), rtol=0, atol=0)
    torch.testing.assert_close(tokens.whitened(taken), whitened(values, mask), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("mask", "moved"),
    [
        ([1, 1, 1, 1, 1, 1], False),
        ([0, 1, 1, 0, 1, 1], False),
        ([1, 1, 0, 1, 1, 0], False),
        ([0, 0, 0, 0, 0, 0], False),
        ([0, 0, 1, 1, 0, 0], False),
        ([1, 0, 1, 0, 0, 0], True),
        ([0, 1, 0, 1, 0, 1], True),
    ],
)
def test_tokens_are_moved_only_where_a_tool_wrote_in_between(mask: list[int], moved: bool) -> None:
    """Tokens are moved only if a tool wrote tokens within a response.

    The batch has two sequences of three tokens, and an empty sequence at either end.
    """
    found = Responses.of(torch.tensor(mask).bool(), torch.tensor([0, 0, 3, 6, 6]))
    assert (found.indices is not None) == moved


@pytest.mark.parametrize("count", [0, 1, 2, 7, 10_001])
def test_whitening_equal_values_gives_exact_zeros(count: int) -> None:
    tokens = Responses.of(torch.ones(count, dtype=torch.bool), torch.tensor([0, count]))
    assert tokens.whitened(torch.full((count,), 0.1)).tolist() == [0.0] * count
