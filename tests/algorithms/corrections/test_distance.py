"""The metrics of the distance between rollout and training, compared with their definitions."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.corrections.distance import distance_observations


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=40)
def test_each_measure_is_its_definition(ragged_columns, lengths, seed) -> None:
    columns = ragged_columns(lengths, seed)
    mask, offsets = columns["response_mask"], columns["offsets"]
    old, rollout = columns["old_log_probs"].double(), columns["log_probs"].double()
    found = {
        name: item.values[item.counted].tolist()
        for name, item in distance_observations(old, rollout, mask, offsets).items()
    }
    cuts = offsets.tolist()
    rows = [
        [(float(old[t]), float(rollout[t])) for t in range(a, b) if mask[t]]
        for a, b in itertools.pairwise(cuts)
    ]
    rows = [row for row in rows if row]
    tokens = [p - q for row in rows for p, q in row]
    training = [-sum(p for p, _ in row) / len(row) for row in rows]
    sampled = [-sum(q for _, q in row) / len(row) for row in rows]
    products = [sum(p - q for p, q in row) for row in rows]
    expected = {
        "kl": [-r for r in tokens],
        "k3_kl": [math.exp(r) - 1 - r for r in tokens],
        "training_ppl": [math.exp(x) for x in training],
        "training_log_ppl": training,
        "rollout_ppl": [math.exp(x) for x in sampled],
        "rollout_log_ppl": sampled,
        "log_ppl_diff": [p - q for p, q in zip(training, sampled, strict=True)],
        "log_ppl_abs_diff": [abs(p - q) for p, q in zip(training, sampled, strict=True)],
        "log_ppl_diff_max": [p - q for p, q in zip(training, sampled, strict=True)],
        "log_ppl_diff_min": [p - q for p, q in zip(training, sampled, strict=True)],
        "ppl_ratio": [math.exp(p - q) for p, q in zip(training, sampled, strict=True)],
        "chi2_token": [math.exp(2 * r) - 1 for r in tokens],
        "chi2_seq": [math.exp(2 * min(max(r, -20.0), 20.0)) - 1 for r in products],
    }
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-9, abs=1e-12), name
