"""Every rejection mode, compared with its equation in float64, and the effect of the bounds."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.algorithms.corrections.registry import REJECTIONS, rejection
from tandem.algorithms.corrections.rejection import rejection_observations, within

MODES = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1",
    "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
)  # fmt: skip
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=6)


def compared(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    far = torch.where(columns["advantages"] > 1.2, 30.0, 1.0)
    return {
        "old_log_probs": columns["old_log_probs"].double(),
        "rollout_log_probs": columns["log_probs"].double() * far,
        "response_mask": columns["response_mask"],
        "offsets": columns["offsets"],
    }


def reference(mode: str, columns: dict[str, Tensor]) -> list[float]:
    """Return the statistic at each response token, 0 elsewhere."""
    level, k = mode.rsplit("_", 1)
    gap = (columns["old_log_probs"] - columns["rollout_log_probs"]).clamp(-20, 20).tolist()
    mask, offsets = columns["response_mask"].tolist(), columns["offsets"].tolist()
    per_token = [{"k1": -r, "k2": r * r / 2, "k3": math.exp(r) - 1 - r}[k] for r in gap]
    found = [0.0] * len(mask)
    for start, stop in itertools.pairwise(offsets):
        tokens = [t for t in range(start, stop) if mask[t]]
        values = [per_token[t] for t in tokens]
        for t in tokens:
            found[t] = {
                "token": per_token[t],
                "seq_sum": sum(values),
                "seq_mean": sum(values) / len(values),
                "seq_max": max(values),
            }[level]
    return found


@pytest.mark.equation("rejections/{mode}")
@pytest.mark.parametrize("mode", MODES)
@given(lengths=LENGTHS, seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=40)
def test_the_statistic_is_its_equation(ragged_columns, mode, lengths, seed) -> None:
    columns = compared(ragged_columns(lengths, seed))
    found = torch.where(columns["response_mask"], rejection(mode)(columns), 0).tolist()
    assert found == pytest.approx(reference(mode, columns), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_samples_does_not_matter(ragged_columns, mode) -> None:
    columns = compared(ragged_columns([4, 7, 1, 9, 3], 5))
    statistic = rejection(mode)(columns)
    cuts = columns["offsets"].tolist()
    spans = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    order = [3, 0, 4, 2, 1]
    moved = {
        name: torch.cat([columns[name][spans[i]] for i in order])
        for name in ("old_log_probs", "rollout_log_probs", "response_mask")
    }
    lengths = columns["offsets"].diff()[order]
    moved["offsets"] = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    mask = moved["response_mask"]
    expected = torch.cat([statistic[spans[i]] for i in order])
    assert torch.equal(torch.where(mask, rejection(mode)(moved), 0), torch.where(mask, expected, 0))


def test_what_is_registered() -> None:
    assert set(REJECTIONS.names) == set(MODES)
    assert [mode for mode in MODES if not rejection(mode).by_sequence] == ["token_k1", "token_k2", "token_k3"]
    documented = rejection("seq_mean_k3").fn.__doc__ or ""
    assert documented.startswith("Reject whole responses by k3, averaged over the response.")
    assert "k_t = exp(r_t) - 1 - r_t" in documented and "statistic = sum_t k_t / T" in documented


def test_bounds_hold_their_ends_and_no_nan() -> None:
    values = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0, torch.nan])
    assert within(values, lower=0.0, upper=1.0).tolist() == [False, True, True, True, False, False]
    assert within(values, lower=None, upper=1.0).tolist() == [True, True, True, True, False, False]


def test_what_is_reported_of_a_mode() -> None:
    mask = torch.tensor([True, True, True, False, True])
    offsets = torch.tensor([0, 2, 5])
    statistic = torch.tensor([-1.0, 0.5, 3.0, 99.0, 0.0], dtype=torch.float64)
    found = rejection_observations(
        "token_k1", statistic, mask, offsets, lower=-0.5, upper=1.0, by_sequence=False
    )
    values = {
        name.removeprefix("rollout_rs_token_k1_"): item.values[item.counted].tolist()
        for name, item in found.items()
    }
    assert values["mean"] == [-1.0, 0.5, 3.0, 0.0]
    assert values["std"] == [-0.5, 0.5, 1.0, 0.0]
    assert values["fraction_high"] == [False, False, True, False]
    assert values["fraction_low"] == [True, False, False, False]
    assert values["masked_fraction"] == [True, False, True, False]
    assert values["seq_mean"] == [-0.25, 1.5]
    assert values["seq_masked_fraction"] == [True, True]
    whole = rejection_observations("m", statistic, mask, offsets, lower=None, upper=1.0, by_sequence=True)
    high = whole["rollout_rs_m_fraction_high"]
    assert high.values[high.counted].tolist() == [False, True]
    assert "rollout_rs_m_fraction_low" not in whole
