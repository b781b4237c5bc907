"""The aggregation of token losses, the value loss and the preference loss."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.aggregation import AGGREGATIONS, aggregate
from tandem.algorithms.bradley_terry import bradley_terry_loss
from tandem.algorithms.value_loss import clipped_value_loss
from tandem.errors import ConfigError
from tests.algorithms.batches import SEEDS, batches, ragged_columns, responses

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
        *(("token-mean", 12 / 3), ("token-sum", 12), ("seq-mean-token-sum", 12 / 2)),
        *(("seq-mean-token-sum-norm", 12 / 2 / 10), ("seq-mean-token-mean", (3 / 2 + 9) / 2)),
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


@pytest.mark.equation("parts/clipped_value_loss")
@given(seed=SEEDS, count=st.integers(1, 50), clip=st.floats(0.01, 2.0))
@settings(deadline=None, max_examples=80)
def test_value_and_gradient(seed, count, clip):
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, count, generator=generator, dtype=torch.float64).unbind()
    values.requires_grad_()
    losses, metrics = clipped_value_loss(values, old, returns, cliprange_value=clip)
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    found = zip(losses.tolist(), gradient.tolist(), metrics["clip_fraction"].tolist(), strict=True)
    for got, v, v_old, target in zip(found, values.tolist(), old.tolist(), returns.tolist(), strict=True):
        plain = (v - target) ** 2
        clipped = (min(max(v, v_old - clip), v_old + clip) - target) ** 2
        slope = v - target if plain >= clipped else 0.0
        assert got == pytest.approx((max(plain, clipped) / 2, slope, float(clipped > plain)), rel=1e-7)


def double(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.equation("parts/bradley_terry_loss")
@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_each_pair_by_hand(coefficient):
    """The gradient pushes the rewards apart by the chance of being wrong."""
    pair = chosen, rejected = double(0.3, -2.0, 40.0, -40.0, 0), double(-0.5, 1.0, -40.0, 40.0, 0)
    margin = double(0.0, 0.5, 1.0, 0.25, 0).detach()
    found = bradley_terry_loss(*pair, margin, center_coefficient=coefficient)
    expected = []
    for a, b, m in zip(chosen.tolist(), rejected.tolist(), margin.tolist(), strict=True):
        gap = a - b - m
        surprise = math.log1p(math.exp(-gap)) if gap > 0 else -gap + math.log1p(math.exp(gap))
        expected.append(surprise + coefficient * (a + b) ** 2)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    wrong = torch.sigmoid(-(chosen - rejected - margin)).detach()
    centre = 2 * coefficient * (chosen + rejected).detach()
    wanted = centre - wrong, centre + wrong
    torch.testing.assert_close(torch.autograd.grad(found.sum(), pair), wanted, rtol=1e-12, atol=1e-15)


def test_unequal_shapes_are_a_bug():
    with pytest.raises(AssertionError):
        bradley_terry_loss(torch.zeros(3), torch.zeros(3), torch.zeros(1))
