"""Importance weights, compared with the equations in float64, token by token."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.algorithms.corrections.registry import IMPORTANCE_WEIGHTS, importance_weight
from tandem.algorithms.corrections.weights import bounded_weights, normalised_weights, weight_observations

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def compared(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the columns of a correction; some rollout log-probs differ by more than 20 nats."""
    far = torch.where(columns["advantages"] > 1.2, 30.0, 1.0)
    return {
        "old_log_probs": columns["old_log_probs"].double(),
        "rollout_log_probs": columns["log_probs"].double() * far,
        "response_mask": columns["response_mask"],
        "offsets": columns["offsets"],
    }


def responses(columns: dict[str, Tensor]) -> list[list[tuple[int, float]]]:
    """Return, for each sequence, its response tokens as pairs (position, log-ratio)."""
    gap = (columns["old_log_probs"] - columns["rollout_log_probs"]).tolist()
    mask, offsets = columns["response_mask"].tolist(), columns["offsets"].tolist()
    return [
        [(t, gap[t]) for t in range(start, stop) if mask[t]] for start, stop in itertools.pairwise(offsets)
    ]


def clamped(value: float) -> float:
    return min(max(value, -20.0), 20.0)


def reference(name: str, columns: dict[str, Tensor]) -> list[float]:
    found = [0.0] * len(columns["response_mask"])
    for tokens in responses(columns):
        total = sum(ratio for _, ratio in tokens)
        for t, ratio in tokens:
            exponent = {"token": ratio, "sequence": total, "geometric": total / len(tokens)}[name]
            found[t] = math.exp(clamped(exponent))
    return found


@pytest.mark.equation("corrections/{name}")
@pytest.mark.parametrize("name", ["token", "sequence", "geometric"])
@given(lengths=LENGTHS, seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=40)
def test_weights_are_their_equations(ragged_columns, name, lengths, seed) -> None:
    columns = compared(ragged_columns(lengths, seed))
    weights = importance_weight(name)(columns)
    found = torch.where(columns["response_mask"], weights, 0).tolist()
    assert found == pytest.approx(reference(name, columns), rel=1e-12)


def test_what_is_registered() -> None:
    assert set(IMPORTANCE_WEIGHTS.names) == {"token", "sequence", "geometric"}
    assert [importance_weight(n).by_sequence for n in ("token", "sequence", "geometric")] == [
        False,
        True,
        True,
    ]


def test_bounds_truncate_or_mask() -> None:
    weights = torch.tensor([0.1, 0.5, 1.0, 2.0, 5.0], dtype=torch.float64)
    assert bounded_weights(weights, lower=None, upper=2.0).tolist() == [0.1, 0.5, 1.0, 2.0, 2.0]
    assert bounded_weights(weights, lower=0.5, upper=2.0).tolist() == [0.0, 0.5, 1.0, 2.0, 0.0]


@pytest.mark.parametrize("by_sequence", [False, True])
@given(lengths=LENGTHS, seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=40)
def test_normalised_weights_have_mean_one(ragged_columns, by_sequence, lengths, seed) -> None:
    columns = compared(ragged_columns(lengths, seed))
    weights = importance_weight("token")(columns)
    mask, offsets = columns["response_mask"], columns["offsets"]
    rows = [[float(weights[t]) for t, _ in tokens] for tokens in responses(columns) if tokens]
    if by_sequence:
        means = [sum(row) / len(row) for row in rows]
    else:
        means = [weight for row in rows for weight in row]
    mean = sum(means) / max(len(means), 1)
    mean = mean if mean > 1e-8 else 1.0
    found, factor = normalised_weights(weights, mask, offsets, by_sequence=by_sequence)
    assert float(factor) == pytest.approx(mean, rel=1e-12)
    assert torch.allclose(found, weights / mean, rtol=1e-12)


def test_what_is_reported_of_weights_is_of_the_right_ones() -> None:
    """Metrics use the raw or the bounded weights, as documented.

    There are two responses of two tokens, the second of which is cut, and a third response without a token.
    """
    mask = torch.tensor([False, True, True, True, True, False])
    offsets = torch.tensor([0, 3, 5, 6])
    raw = torch.tensor([9.0, 0.5, 1.5, 4.0, 0.4, 9.0], dtype=torch.float64)
    found = weight_observations(
        raw, raw.clamp(max=2.0), mask, offsets, lower=None, upper=2.0, by_sequence=False
    )
    values = {name: item.values[item.counted].tolist() for name, item in found.items()}
    assert values["rollout_is_mean"] == [0.5, 1.5, 2.0, 0.4]
    assert values["rollout_is_ratio_fraction_high"] == [False, False, True, False]
    assert values["rollout_is_ratio_fraction_low"] == [False, False, False, True]  # below 1 / 2
    assert values["rollout_is_seq_mean"] == [1.0, 1.2]
    assert values["rollout_is_seq_max_deviation"] == pytest.approx([0.0, 0.2])
    assert values["rollout_is_seq_fraction_high"] == [False, True]  # raw mean 2.2
    assert "rollout_is_oob_ratio" not in values
    shared = weight_observations(raw, raw, mask, offsets, lower=0.6, upper=2.0, by_sequence=True)
    assert shared["rollout_is_ratio_fraction_high"].counted.tolist() == [True, True, False]
    outside = shared["rollout_is_oob_ratio"]
    assert outside.values[outside.counted].tolist() == [True, False, True, True]
