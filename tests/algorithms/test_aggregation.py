from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.algorithms.aggregation import AGGREGATIONS, aggregate
from tandem.errors import ConfigError

NORM_LENGTH = 37


def slow_aggregate(values: Tensor, mask: Tensor, rows: list[slice], mode: str) -> Tensor:
    """Compute the loss by its definition, sequence by sequence; differentiable."""
    sequences = [values[row][mask[row]] for row in rows if mask[row].any()]
    if not sequences:
        return values.sum() * 0
    per_sequence = {
        "token-mean": lambda: torch.cat(sequences).mean(),
        "token-sum": lambda: torch.cat(sequences).sum(),
        "seq-mean-token-sum": lambda: torch.stack([s.sum() for s in sequences]).mean(),
        "seq-mean-token-sum-norm": lambda: torch.stack([s.sum() for s in sequences]).mean() / NORM_LENGTH,
        "seq-mean-token-mean": lambda: torch.stack([s.mean() for s in sequences]).mean(),
    }
    return per_sequence[mode]()


def counts(mask: Tensor, rows: list[slice]) -> dict[str, int]:
    return {"tokens": int(mask.sum()), "sequences": sum(bool(mask[row].any()) for row in rows)}


@pytest.mark.equation("parts/aggregate")
@pytest.mark.parametrize("mode", AGGREGATIONS)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=8), seed=st.integers(0, 2**31), data=st.data()
)
@settings(deadline=None, max_examples=40)
def test_value_gradient_and_micro_batches(mode, lengths, seed, data, ragged_columns, rows) -> None:
    columns = ragged_columns(lengths, seed, torch.float64)
    mask, offsets, spans = columns["response_mask"], columns["offsets"], rows(columns)
    values = columns["log_probs"].requires_grad_()
    given_counts = {"mode": mode, **counts(mask, spans), "norm_length": NORM_LENGTH}

    want = slow_aggregate(values, mask, spans, mode)
    got = aggregate(values, mask, offsets, **given_counts)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    gradient = torch.autograd.grad(want, values, allow_unused=True, materialize_grads=True)[0]
    torch.testing.assert_close(torch.autograd.grad(got, values)[0], gradient, rtol=1e-12, atol=1e-15)

    cuts = sorted({0, len(lengths), *data.draw(st.lists(st.integers(0, len(lengths)), max_size=4))})
    parts = []
    for first, last in pairwise(cuts):
        part = offsets[first : last + 1]
        span = slice(int(part[0]), int(part[-1]))
        parts.append(aggregate(values[span], mask[span], part - part[0], **given_counts))
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
def test_an_empty_response_changes_nothing(mode: str, expected: float) -> None:
    """An empty response, or one with all tokens masked, does not change the loss."""
    arguments = {"mode": mode, "tokens": 3, "sequences": 2, "norm_length": 10}
    values, mask = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, True])
    without = aggregate(values, mask, torch.tensor([0, 2, 3]), **arguments)
    values, mask = torch.tensor([1.0, 2.0, 5.0, 9.0]), torch.tensor([True, True, False, True])
    with_both = aggregate(values, mask, torch.tensor([0, 2, 2, 3, 4]), **arguments)
    assert without.item() == with_both.item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_what_is_masked_does_not_matter(mode: str) -> None:
    mask = torch.tensor([False, True, True, False])
    offsets = torch.tensor([0, 3, 4])
    values = torch.tensor([torch.nan, 1.0, 3.0, torch.inf], requires_grad=True)
    loss = aggregate(values, mask, offsets, mode=mode, tokens=2, sequences=1, norm_length=10)
    expected = {"token-mean": 2.0, "seq-mean-token-sum-norm": 0.4, "seq-mean-token-mean": 2.0}
    assert loss.item() == pytest.approx(expected.get(mode, 4.0))
    (gradient,) = torch.autograd.grad(loss, values)
    assert gradient[[0, 3]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_ghost_micro_batch_adds_zero(mode: str) -> None:
    values = torch.ones(2, requires_grad=True)
    mask = torch.zeros(2, dtype=torch.bool)
    for tokens, sequences in ((0, 0), (5, 2)):
        loss = aggregate(
            values, mask, torch.tensor([0, 2]), mode=mode, tokens=tokens, sequences=sequences, norm_length=4
        )
        assert loss.item() == 0.0
        assert torch.autograd.grad(loss, values)[0].tolist() == [0.0, 0.0]


def test_unknown_mode_and_missing_length() -> None:
    arguments = (torch.ones(1), torch.ones(1, dtype=torch.bool), torch.tensor([0, 1]))
    with pytest.raises(ConfigError, match="token-mean"):
        aggregate(*arguments, mode="mean", tokens=1, sequences=1)
    with pytest.raises(ConfigError, match="loss_scale_factor"):
        aggregate(*arguments, mode="seq-mean-token-sum-norm", tokens=1, sequences=1)
