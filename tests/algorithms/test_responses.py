import pytest
import torch
from hypothesis import strategies as st

from tandem.algorithms.responses import Responses
from tests.algorithms.batches import batches, ragged_columns, rows, whitened


@batches(60, holes=st.sampled_from([0.0, 0.05, 0.9]))
def test_response_tokens_follow_each_other(lengths, seed, holes):
    columns = ragged_columns(lengths, seed, torch.float64, holes)
    mask, values = columns["response_mask"], columns["values"]
    tokens = Responses.of(mask, columns["offsets"])
    taken = tokens.take(values)
    for i, row in enumerate(rows(columns)):
        mine = taken[tokens.offsets[i] : tokens.offsets[i + 1]]
        if tokens.indices is None:
            assert len(mine) == row.stop - row.start and not mine[~mask[row]].any()
            mine = mine[mask[row]]
        assert torch.equal(mine, values[row][mask[row]])
    added = tokens.put(tokens.add_(taken.clone(), values))
    torch.testing.assert_close(added, torch.where(mask, 2 * values, 0), rtol=0, atol=0)
    torch.testing.assert_close(tokens.put(taken.clone()), torch.where(mask, values, 0), rtol=0, atol=0)
    torch.testing.assert_close(tokens.whitened(taken), whitened(values, mask), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("mask", "moved"),
    [
        *((mask, False) for mask in ("111111", "011011", "110110", "000000", "001100")),
        *((mask, True) for mask in ("101000", "010101")),
    ],
)
def test_tokens_are_moved_only_where_a_tool_wrote_in_between(mask, moved):
    """The batch has two sequences of three tokens, and an empty sequence at either end."""
    inside = torch.tensor([each == "1" for each in mask])
    assert (Responses.of(inside, torch.tensor([0, 0, 3, 6, 6])).indices is not None) == moved


@pytest.mark.parametrize("count", [0, 1, 2, 7, 10_001])
def test_whitening_equal_values_gives_exact_zeros(count):
    tokens = Responses.of(torch.ones(count, dtype=torch.bool), torch.tensor([0, count]))
    assert tokens.whitened(torch.full((count,), 0.1)).tolist() == [0.0] * count
