"""Sums, statistics and places of response tokens, and statistics of groups."""

import math
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms import masked
from tandem.algorithms.groups import group_statistics
from tandem.algorithms.responses import Responses
from tests.algorithms.batches import SEEDS, batches, ragged_columns, responses, rows, whitened

EDGES = st.lists(st.sampled_from([0, 1, 3, 63, 64, 65, 128, 129, 1000, 4096]), min_size=1, max_size=9)


@given(lengths=EDGES | st.lists(st.integers(0, 300), min_size=1, max_size=8), seed=SEEDS)
@settings(deadline=None, max_examples=100)
def test_sums_spreads_and_kept_tokens(lengths, seed):
    """Every other sequence is NaN, which would show if a sum included a neighbour."""
    columns = ragged_columns(lengths, seed)
    values, mask, offsets = columns["log_probs"], columns["response_mask"], columns["offsets"]
    spans, tokens = rows(columns), responses(columns)
    plain = torch.tensor([math.fsum(values[row].tolist()) for row in spans])
    torch.testing.assert_close(masked.segment_sum(values, offsets), plain)
    for row in spans[::2]:
        values[row] = torch.nan
    sums, counts = masked.segment_sum(values, offsets, dtype=torch.float64), masked.segment_sum(mask, offsets)
    assert (sums.dtype, counts.dtype) == (torch.float64, torch.int64)
    assert counts.tolist() == [len(mine) for mine in tokens]
    exact = [math.fsum(values[row].tolist()) for row in spans[1::2]]
    assert sums[1::2].tolist() == pytest.approx(exact, abs=1e-10)
    spread = masked.spread(torch.arange(len(lengths)) + 1.0, mask, offsets)
    kept = masked.kept_tokens(mask, offsets)
    for i, (row, mine) in enumerate(zip(spans, tokens, strict=True)):
        assert torch.equal(spread[row], torch.where(mask[row], i + 1.0, 0.0))
        assert kept.indices[kept.offsets[i] : kept.offsets[i + 1]].tolist() == mine
    assert (kept.offsets[0], kept.offsets[-1]) == (0, len(kept.indices))


@pytest.mark.parametrize("tile", [1, 7, 64])
def test_a_sequence_in_several_tiles_has_one_sum(monkeypatch, tile):
    monkeypatch.setattr(masked, "_TILE", tile)
    lengths = [3, 0, 64, 65, 1, 200, 0, 7]
    values = torch.randn(sum(lengths), dtype=torch.float64)
    wanted = [math.fsum(part.tolist()) for part in values.split(lengths)]
    sums = masked.segment_sum(values, torch.tensor([0, *accumulate(lengths)]))
    assert sums.tolist() == pytest.approx(wanted, abs=1e-12)


@given(lengths=EDGES, seed=SEEDS)
@settings(deadline=None, max_examples=40)
def test_gradients_of_sums_and_spreads(lengths, seed):
    columns = ragged_columns(lengths, seed, torch.float64)
    mask, offsets = columns["response_mask"], columns["offsets"]
    weights = torch.rand(len(mask), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    per_sequence = torch.ones(len(lengths), dtype=torch.float64, requires_grad=True)
    (masked.spread(per_sequence, mask, offsets) * weights).sum().backward()
    want = torch.stack([(weights * mask)[row].sum() for row in rows(columns)])
    torch.testing.assert_close(per_sequence.grad, want)
    values = weights.clone().requires_grad_()
    (masked.segment_sum(values, offsets) * want).sum().backward()
    assert torch.equal(values.grad, want.repeat_interleave(offsets.diff()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_infinite_numbers_stay_inside_the_mask(dtype):
    mask, offsets = torch.tensor([True, False, False, True, True]), torch.tensor([0, 2, 3, 5])
    per_token = masked.spread(torch.tensor([torch.inf, torch.nan, 2.5], dtype=dtype), mask, offsets)
    assert (per_token.dtype, per_token.tolist()) == (dtype, [torch.inf, 0.0, 0.0, 2.5, 2.5])
    assert masked.segment_sum(torch.arange(5, dtype=dtype), offsets).tolist() == [1.0, 2.0, 7.0]
    empty = torch.zeros(3, dtype=torch.int64)
    assert masked.segment_sum(torch.ones(0, dtype=dtype), empty).tolist() == [0.0, 0.0]


@batches(60, longest=300)
def test_statistics_against_numpy_with_nan_outside_the_mask(lengths, seed):
    columns = ragged_columns(lengths, seed, torch.float64)
    values, mask = columns["values"], columns["response_mask"]
    inside = values[mask].numpy()
    mean = inside.mean() if len(inside) else 0.0
    variance = np.var(inside, ddof=1) if len(inside) > 1 else 0.0
    assert masked.masked_mean(values, mask).item() == pytest.approx(mean, abs=1e-12)
    assert masked.masked_var(values, mask).item() == pytest.approx(variance, abs=1e-12)
    want = whitened(values, mask)[mask]
    torch.testing.assert_close(masked.whiten_(values[mask]), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 10_001])
def test_whitening_equal_values_gives_exact_zeros(count):
    tokens = Responses.of(torch.ones(count, dtype=torch.bool), torch.tensor([0, count]))
    for whiten in (masked.whiten_, tokens.whitened):
        assert whiten(torch.full((count,), 0.1)).tolist() == [0.0] * count


def test_whitening_keeps_float32_precision_far_from_zero():
    values = 1000 + torch.randn(5000, generator=torch.Generator().manual_seed(0))
    want = (values.double() - values.double().mean()) / values.double().std()
    torch.testing.assert_close(masked.whiten_(values).double(), want, rtol=0, atol=1e-4)


def test_explained_variance():
    returns = torch.tensor([1.0, 2.0, 3.0, 7.0, torch.nan])
    four, two = torch.full((5,), 4.0), torch.full((5,), 2.0)
    for values, targets, explained in (
        *((returns, returns, 1.0), (four, returns, 0.0), (-returns, returns, 1 - 4.0)),
        *((0.5 * returns, returns, 0.75), (two, two, 1.0)),
    ):
        found = masked.explained_variance(values, targets, torch.tensor([True] * 4 + [False])).item()
        assert found == pytest.approx(explained, abs=1e-5)


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
    "mask", ["111111", "011011", "110110", "000000", "001100", "101000", "010101", "011101"]
)
def test_tokens_are_moved_only_where_a_tool_wrote_in_between(mask):
    """The batch has two sequences of three tokens, and an empty sequence at either end."""
    inside = torch.tensor([each == "1" for each in mask])
    moved = Responses.of(inside, torch.tensor([0, 0, 3, 6, 6])).indices is not None
    assert moved == ("101" in (mask[:3], mask[3:]))


@given(group=st.lists(st.integers(0, 6), max_size=40), seed=SEEDS)
@settings(deadline=None, max_examples=80)
def test_statistics_of_groups_against_numpy(group, seed):
    scores = torch.randn(len(group), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    groups = torch.tensor(group, dtype=torch.int64)
    got = group_statistics(scores, groups)
    assert [len(part) for part in got] == [len(group)] * 3
    for i, mine in enumerate(group):
        members = scores[groups == mine].numpy()
        mean, std = (members.mean(), np.std(members, ddof=1)) if len(members) > 1 else (0.0, 1.0)
        found = got.size[i].item(), got.mean[i].item(), got.std[i].item()
        assert found == pytest.approx((len(members), mean, std), abs=1e-12)


@pytest.mark.parametrize("value", [0.1, 1.0, -7.3, 1e6 + 0.1])
def test_equal_scores_have_exactly_their_own_mean(value):
    scores = torch.full((7,), value, dtype=torch.float32).double()
    got = group_statistics(scores, torch.zeros(7, dtype=torch.int64))
    assert torch.equal(got.mean, scores)
    assert got.std.tolist() == [0.0] * 7
