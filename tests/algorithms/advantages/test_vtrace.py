from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.algorithms.advantages.gae import gae
from tandem.algorithms.advantages.vtrace import vtrace
from tandem.errors import ConfigError

INPUTS = (
    "token_level_rewards", "values", "old_log_probs", "rollout_log_probs", "response_mask", "offsets",
)  # fmt: skip


def slow_vtrace(columns, rows, gamma, lam, rho_bar, c_bar) -> tuple[Tensor, Tensor]:
    """Compute the paper's sum over the future tokens of each token, in float64."""
    rewards, values, old, rollout, mask = (columns[name].tolist() for name in INPUTS[:-1])
    targets, advantages = (torch.zeros(len(mask), dtype=torch.float64) for _ in range(2))
    for row in rows:
        kept = [t for t in range(row.start, row.stop) if mask[t]]
        ratio = [math.exp(min(max(old[t] - rollout[t], -20), 20)) for t in kept]
        after = [*(values[t] for t in kept[1:]), 0.0][: len(kept)]
        delta = [
            min(rho_bar, w) * (rewards[t] + gamma * v - values[t])
            for t, w, v in zip(kept, ratio, after, strict=True)
        ]
        found = []
        for s, place in enumerate(kept):
            total, weight = values[place], 1.0
            for t in range(s, len(kept)):
                total += weight * delta[t]
                weight *= gamma * lam * min(c_bar, ratio[t])
            found.append(total)
        for s, place in enumerate(kept):
            following = found[s + 1] if s + 1 < len(kept) else 0.0
            targets[place] = found[s]
            surprise = rewards[place] + gamma * following - values[place]
            advantages[place] = min(rho_bar, ratio[s]) * surprise
    return targets, advantages


@pytest.mark.equation("advantages/vtrace")
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    gamma=st.sampled_from([0.0, 0.99, 1.0]) | st.floats(0, 1),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    bars=st.sampled_from([(1.0, 1.0), (2.0, 0.5), (0.3, 0.3)]),
    holes=st.sampled_from([0.0, 0.2, 0.9]),
)
@settings(deadline=None, max_examples=40)
def test_against_the_papers_sum(lengths, seed, gamma, lam, bars, holes, ragged_columns, rows) -> None:
    columns = ragged_columns(lengths, seed, torch.float64, holes)
    inputs = [columns[name] for name in INPUTS]
    got = vtrace(*inputs, gamma=gamma, lam=lam, rho_bar=bars[0], c_bar=bars[1])
    targets, advantages = slow_vtrace(columns, rows(columns), gamma, lam, *bars)
    torch.testing.assert_close(got.returns, targets, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.advantages, advantages, rtol=1e-9, atol=1e-9)


@pytest.mark.equation("advantages/vtrace")
def test_on_policy_its_values_are_those_of_gae(ragged_columns) -> None:
    """With all weights 1, the value targets equal GAE's returns: v = V + sum of (gamma lam)^k delta.

    With lam = 1, the advantages also equal GAE's advantages before whitening.
    """
    columns = ragged_columns([300, 40], seed=5, dtype=torch.float64)
    columns["rollout_log_probs"] = columns["old_log_probs"]
    for lam in (0.9, 1.0):
        got = vtrace(*(columns[name] for name in INPUTS), gamma=0.98, lam=lam)
        names = ("token_level_rewards", "values", "response_mask", "offsets")
        want = gae(*(columns[name] for name in names), gamma=0.98, lam=lam).returns
        torch.testing.assert_close(got.returns, want, rtol=1e-10, atol=1e-10)
    raw = torch.where(columns["response_mask"], want - columns["values"], 0)
    torch.testing.assert_close(got.advantages, raw, rtol=1e-10, atol=1e-10)


@pytest.mark.equation("advantages/vtrace")
def test_float32_at_32768_steps(ragged_columns) -> None:
    """float32 follows v_t - V_t = rho_t delta_t + gamma c_t (v_{t+1} - V_{t+1}) over 32,768 steps."""
    columns = ragged_columns([32768, 17], seed=3)
    columns["rollout_log_probs"] = columns["old_log_probs"] + 0.01 * columns["values"]
    rewards, values, old, rollout, mask = (columns[name].tolist() for name in INPUTS[:-1])
    want, gain, after, seen = torch.zeros(len(mask), dtype=torch.float64), 0.0, 0.0, 0
    for t in reversed(range(len(mask))):
        if t == 32767:
            gain = after = 0.0
        if mask[t]:
            weight = min(1.0, math.exp(old[t] - rollout[t]))
            gain = weight * (rewards[t] + after - values[t]) + weight * gain
            want[t], after, seen = gain + values[t], values[t], seen + 1
    assert seen > 20_000
    got = vtrace(*(columns[name] for name in INPUTS))
    assert (got.returns - want).abs().max() <= 2e-6 * want.abs().max()


def test_bounds_that_the_theory_does_not_allow(ragged_columns) -> None:
    columns = ragged_columns([4], seed=0)
    for bars in ({"c_bar": 1.5}, {"rho_bar": 0.5}, {"c_bar": -0.1}):
        with pytest.raises(ConfigError, match="c_bar: out of range"):
            vtrace(*(columns[name] for name in INPUTS), **bars)
