from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.masked import (
    explained_variance,
    kept_tokens,
    masked_mean,
    masked_var,
    segment_sum,
    spread,
    whiten_,
)

LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=8)
SEEDS = st.integers(0, 2**31)


@given(lengths=LENGTHS, seed=SEEDS)
@settings(deadline=None, max_examples=60)
def test_segment_sum_and_spread(lengths, seed, ragged_columns, rows) -> None:
    columns = ragged_columns(lengths, seed)
    values, mask, offsets = columns["log_probs"], columns["response_mask"], columns["offsets"]
    want = torch.tensor([math.fsum(values[row].tolist()) for row in rows(columns)])
    torch.testing.assert_close(segment_sum(values, offsets), want)
    counts = segment_sum(mask, offsets)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [int(mask[row].sum()) for row in rows(columns)]
    spread_out = spread(counts, mask, offsets)
    for row, count in zip(rows(columns), counts.tolist(), strict=True):
        assert spread_out[row].tolist() == [count if on else 0 for on in mask[row].tolist()]


@given(lengths=st.lists(st.sampled_from([0, 1, 3, 64, 1000]), min_size=1, max_size=5), seed=SEEDS)
@settings(deadline=None, max_examples=40)
def test_gradients_of_sums_and_spreads(lengths, seed, ragged_columns, rows) -> None:
    columns = ragged_columns(lengths, seed, torch.float64)
    mask, offsets = columns["response_mask"], columns["offsets"]
    weights = torch.rand(len(mask), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    per_sequence = torch.ones(len(lengths), dtype=torch.float64, requires_grad=True)
    (spread(per_sequence, mask, offsets) * weights).sum().backward()
    want = torch.stack([(weights * mask)[row].sum() for row in rows(columns)])
    torch.testing.assert_close(per_sequence.grad, want)
    values = weights.clone().requires_grad_()
    (segment_sum(values, offsets) * want).sum().backward()
    assert torch.equal(values.grad, want.repeat_interleave(offsets.diff()))


@given(
    lengths=st.lists(st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129, 1000, 4096]), min_size=1, max_size=9),
    seed=SEEDS,
)
@settings(deadline=None, max_examples=60)
def test_nothing_leaks_between_sequences(lengths, seed, ragged_columns, rows) -> None:
    """Neighbouring sequences are NaN, which would show if a sum included them."""
    columns = ragged_columns(lengths, seed)
    values, offsets, spans = columns["log_probs"], columns["offsets"], rows(columns)
    for i in range(0, len(lengths), 2):
        values[spans[i]] = torch.nan
    sums = segment_sum(values, offsets, dtype=torch.float64)
    counts = segment_sum(columns["response_mask"], offsets)
    assert (sums.dtype, counts.dtype) == (torch.float64, torch.int64)
    spread_out = spread(torch.arange(len(lengths)) + 1.0, columns["response_mask"], offsets)
    for i, row in enumerate(spans):
        assert torch.equal(spread_out[row], torch.where(columns["response_mask"][row], i + 1.0, 0.0))
        assert counts[i] == columns["response_mask"][row].sum()
        if i % 2:
            assert sums[i].item() == pytest.approx(math.fsum(values[row].tolist()), abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_infinite_numbers_stay_inside_the_mask(dtype: torch.dtype) -> None:
    mask, offsets = torch.tensor([True, False, False, True, True]), torch.tensor([0, 2, 3, 5])
    per_token = spread(torch.tensor([torch.inf, torch.nan, 2.5], dtype=dtype), mask, offsets)
    assert (per_token.dtype, per_token.tolist()) == (dtype, [torch.inf, 0.0, 0.0, 2.5, 2.5])
    assert segment_sum(torch.arange(5, dtype=dtype), offsets).tolist() == [1.0, 2.0, 7.0]
    assert segment_sum(torch.ones(0, dtype=dtype), torch.zeros(3, dtype=torch.int64)).tolist() == [0.0, 0.0]


@given(lengths=LENGTHS, seed=SEEDS)
@settings(deadline=None, max_examples=60)
def test_kept_tokens(lengths, seed, ragged_columns, rows) -> None:
    columns = ragged_columns(lengths, seed)
    kept = kept_tokens(columns["response_mask"], columns["offsets"])
    for i, row in enumerate(rows(columns)):
        mine = kept.indices[kept.offsets[i] : kept.offsets[i + 1]]
        assert mine.tolist() == [t for t in range(row.start, row.stop) if columns["response_mask"][t]]
    assert kept.offsets[0] == 0
    assert kept.offsets[-1] == len(kept.indices)


@given(lengths=LENGTHS, seed=SEEDS)
@settings(deadline=None, max_examples=60)
def test_statistics_against_numpy_with_nan_outside_the_mask(lengths, seed, ragged_columns, whitened) -> None:
    columns = ragged_columns(lengths, seed, torch.float64)
    values, mask = columns["values"], columns["response_mask"]
    inside = values[mask].numpy()
    assert masked_mean(values, mask).item() == pytest.approx(inside.mean() if len(inside) else 0.0, abs=1e-12)
    variance = np.var(inside, ddof=1) if len(inside) > 1 else 0.0
    assert masked_var(values, mask).item() == pytest.approx(variance, abs=1e-12)
    want = whitened(values, mask)[mask]
    torch.testing.assert_close(whiten_(values[mask]), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 10_001])
def test_whitening_equal_values_gives_exact_zeros(count: int) -> None:
    assert whiten_(torch.full((count,), 0.1)).tolist() == [0.0] * count


def test_whitening_keeps_float32_precision_far_from_zero() -> None:
    values = 1000 + torch.randn(5000, generator=torch.Generator().manual_seed(0))
    want = (values.double() - values.double().mean()) / values.double().std()
    torch.testing.assert_close(whiten_(values).double(), want, rtol=0, atol=1e-4)


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 7.0, torch.nan])
    mask = torch.tensor([True, True, True, True, False])
    assert explained_variance(returns, returns, mask).item() == pytest.approx(1.0)
    assert explained_variance(torch.full((5,), 4.0), returns, mask).item() == pytest.approx(0.0, abs=1e-5)
    assert explained_variance(-returns, returns, mask).item() == pytest.approx(1 - 4, abs=1e-4)
    half = 0.5 * returns
    assert explained_variance(half, returns, mask).item() == pytest.approx(0.75, abs=1e-5)
    constant = torch.full((5,), 2.0)
    assert explained_variance(constant, constant, mask).item() == 1.0
