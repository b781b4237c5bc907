from itertools import pairwise

import pytest
import torch
from hypothesis import strategies as st

from tandem.algorithms.aggregation import AGGREGATIONS, aggregate
from tandem.errors import ConfigError
from tests.algorithms.batches import batches, ragged_columns, responses

NORM_LENGTH = 37


def slow_aggregate(values, columns, mode):
    """Compute the loss by its definition, sequence by sequence; differentiable."""
    sequences = [values[tokens] for tokens in responses(columns) if tokens]
    if not sequences:
        return values.sum() * 0
    if mode in ("token-mean", "token-sum"):
        tokens = torch.cat(sequences)
        return tokens.mean() if mode == "token-mean" else tokens.sum()
    per_sequence = [s.mean() if mode == "seq-mean-token-mean" else s.sum() for s in sequences]
    return torch.stack(per_sequence).mean() / (NORM_LENGTH if mode == "seq-mean-token-sum-norm" else 1)


@pytest.mark.equation("parts/aggregate")
@pytest.mark.parametrize("mode", AGGREGATIONS)
@batches(40, data=st.data())
def test_value_gradient_and_micro_batches(mode, lengths, seed, data):
    columns = ragged_columns(lengths, seed, torch.float64)
    mask, offsets = columns["response_mask"], columns["offsets"]
    values = columns["log_probs"].requires_grad_()
    sequences = sum(bool(tokens) for tokens in responses(columns))
    options = {"mode": mode, "tokens": int(mask.sum()), "sequences": sequences, "norm_length": NORM_LENGTH}

    want = slow_aggregate(values, columns, mode)
    got = aggregate(values, mask, offsets, **options)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    gradient = torch.autograd.grad(want, values, allow_unused=True, materialize_grads=True)[0]
    torch.testing.assert_close(torch.autograd.grad(got, values)[0], gradient, rtol=1e-12, atol=1e-15)

    cuts = sorted({0, len(lengths), *data.draw(st.lists(st.integers(0, len(lengths)), max_size=4))})
    parts = []
    for first, last in pairwise(cuts):
        part = offsets[first : last + 1]
        span = slice(int(part[0]), int(part[-1]))
        parts.append(aggregate(values[span], mask[span], part - part[0], **options))
    torch.testing.assert_close(torch.stack(parts).sum(), want, rtol=1e-12, atol=1e-12)


@pytest.mark.equation("parts/aggregate")
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 12 / 3),
        ("token-sum", 12),
        ("seq-mean-token-sum", 12 / 2),
        ("seq-mean-token-sum-norm", 12 / 2 / 10),
        ("seq-mean-token-mean", (3 / 2 + 9) / 2),
    ],
)
def test_neither_an_empty_response_nor_a_masked_token_changes_anything(mode, expected):
    arguments = {"mode": mode, "tokens": 3, "sequences": 2, "norm_length": 10}
    for numbers, offsets in (
        ([1.0, 2.0, 9.0], [0, 2, 3]),
        ([1.0, 2.0, torch.nan, 9.0], [0, 2, 2, 3, 4]),
        ([torch.inf, 1.0, torch.nan, 2.0, 9.0, torch.nan], [0, 4, 5, 6]),
    ):
        values = torch.tensor(numbers, requires_grad=True)
        loss = aggregate(values, values.isfinite(), torch.tensor(offsets), **arguments)
        assert loss.item() == pytest.approx(expected)
        (gradient,) = torch.autograd.grad(loss, values)
        assert torch.equal(gradient != 0, values.isfinite())


def test_unknown_mode_and_missing_length():
    arguments = (torch.ones(1), torch.ones(1, dtype=torch.bool), torch.tensor([0, 1]))
    for mode, telling in (("mean", "token-mean"), ("seq-mean-token-sum-norm", "loss_scale_factor")):
        with pytest.raises(ConfigError, match=telling):
            aggregate(*arguments, mode=mode, tokens=1, sequences=1)
