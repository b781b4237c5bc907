"""Properties that every registered estimator must have, whatever its equation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.algorithms.registry import ADVANTAGES, Advantages
from tandem.algorithms.registry import advantage_estimator as find

WHOLE_BATCH = {"gae", "gdpo", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}
"""Estimators that use a statistic of the whole batch."""

PER_SEQUENCE = ("group", "reward_baselines", "reward_components")
SEEDS = st.integers(0, 2**31)
LENGTHS = st.lists(st.integers(0, 60) | st.sampled_from([1, 400]), min_size=2, max_size=8)
Columns = dict[str, Tensor]


def usable(columns: Columns) -> Columns:
    """Change random columns so that every estimator accepts them.

    Rewards lie in [0, 1], as estimators of success rates require, and probabilities are valid.
    """
    rewards = columns["token_level_rewards"].abs().clamp(max=1)
    squares = columns["old_log_probs"].exp() ** 2 + 0.1
    nan = torch.tensor(torch.nan, dtype=rewards.dtype)
    mask = columns["response_mask"]
    return columns | {
        "token_level_rewards": rewards,
        "sum_pi_squared": torch.where(mask, squares, nan),
        "old_log_probs": torch.where(mask, columns["old_log_probs"], nan),
        "ref_log_probs": torch.where(mask, columns["log_probs"], nan),
        "token_level_scores": rewards,
    }


def chosen(columns: Columns, rows: list[slice], order: list[int]) -> Columns:
    """Return the sequences with the given indices, in that order."""
    tokens = torch.cat([torch.arange(rows[i].start, rows[i].stop) for i in order])
    lengths = torch.tensor([0, *(rows[i].stop - rows[i].start for i in order)])
    out = {
        name: column[order if name in PER_SEQUENCE else tokens]
        for name, column in columns.items()
        if name != "offsets"
    }
    return out | {"offsets": lengths.cumsum(0)}


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ADVANTAGES.names)
@given(lengths=LENGTHS, seed=SEEDS)
@settings(deadline=None, max_examples=8)
def test_the_order_of_the_samples_does_not_matter(name, lengths, seed, ragged_columns, rows) -> None:
    columns = usable(ragged_columns(lengths, seed, torch.float64))
    spans = rows(columns)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    before, after = find(name)(columns), find(name)(chosen(columns, spans, order))
    for old, new in zip(before, after, strict=True):
        close(new, torch.cat([old[spans[i]] for i in order]))


@pytest.mark.parametrize("name", ADVANTAGES.names)
@given(lengths=LENGTHS, seed=SEEDS)
@settings(deadline=None, max_examples=8)
def test_tokens_outside_the_mask_do_not_matter(name, lengths, seed, ragged_columns, rows) -> None:
    """Additional tokens outside the mask change nothing.

    Each sequence gets two tokens before it and three tokens after it, with NaN in all columns but the
    rewards.
    """
    columns = usable(ragged_columns(lengths, seed, torch.float64, holes=0.0))
    spans = rows(columns)
    wide: dict[str, Tensor] = {}
    for key, column in columns.items():
        if key in PER_SEQUENCE or key == "offsets":
            wide[key] = column + 5 * torch.arange(len(column)) if key == "offsets" else column
            continue
        empty = 0 if key.startswith("token_level") or key == "response_mask" else torch.nan
        front, back = (torch.full((n,), empty, dtype=torch.float64).to(column.dtype) for n in (2, 3))
        wide[key] = torch.cat([part for row in spans for part in (front, column[row], back)])
    before, after = find(name)(columns), find(name)(wide)
    places = torch.cat([torch.arange(row.start, row.stop) + 5 * i + 2 for i, row in enumerate(spans)])
    for old, new in zip(before, after, strict=True):
        close(new[places], old)
        outside = torch.ones(len(new), dtype=torch.bool)
        outside[places] = False
        assert not new[outside].any()


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES.names) - WHOLE_BATCH))
@given(lengths=LENGTHS, seed=SEEDS)
@settings(deadline=None, max_examples=8)
def test_groups_may_come_in_parts(name, lengths, seed, ragged_columns, rows) -> None:
    columns = usable(ragged_columns(lengths, seed, torch.float64))
    spans, whole = rows(columns), find(name)(columns)
    for number in set(columns["group"].tolist()):
        mine = [i for i, each in enumerate(columns["group"].tolist()) if each == number]
        part = find(name)(chosen(columns, spans, mine))
        for old, new in zip(whole, part, strict=True):
            close(new, torch.cat([old[spans[i]] for i in mine]))


@pytest.mark.parametrize("name", ADVANTAGES.names)
@pytest.mark.parametrize("lengths", [[1], [3, 1], [0, 4], [5, 5, 5, 5], [4096, 1, 4095]])
@pytest.mark.parametrize("case", ["no response", "all alone", "equal rewards", "no rewards"])
def test_edges_give_finite_numbers_that_leave_the_inputs_alone(name, lengths, case, ragged_columns) -> None:
    columns = usable(ragged_columns(lengths, seed=1))
    if case == "no response":
        columns["response_mask"] = torch.zeros_like(columns["response_mask"])
    elif case == "all alone":
        columns["group"] = torch.arange(len(lengths))
    else:
        columns["group"] = torch.zeros_like(columns["group"])
        columns["token_level_rewards"] = torch.where(
            columns["response_mask"], 0.3 if case == "equal rewards" else 0.0, 0.0
        )
    before = {key: column.clone() for key, column in columns.items()}
    got = find(name)(columns)
    assert isinstance(got, Advantages)
    for part in got:
        assert part.dtype == torch.float32
        assert bool(part.isfinite().all())
        assert not part[~columns["response_mask"]].any()
    for key, column in columns.items():
        torch.testing.assert_close(column, before[key], rtol=0, atol=0, equal_nan=True)
