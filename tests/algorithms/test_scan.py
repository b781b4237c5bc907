from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.algorithms.scan import (
    discounted_cumsum,
    following,
    last_indices,
    longest_of,
    reverse_discounted_cumsum_,
    reverse_linear_scan_,
)


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])


def slow_sums(values: Tensor, lengths: list[int], discount: float) -> Tensor:
    """Compute the sums in float64, one value at a time."""
    out = []
    for row in values.double().split(lengths):
        running, sums = 0.0, []
        for x in reversed(row.tolist()):
            running = x + discount * running
            sums.append(running)
        out.extend(reversed(sums))
    return torch.tensor(out, dtype=torch.float64)


def random_values(lengths: list[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), generator=generator, dtype=torch.float64).to(dtype)


@given(
    lengths=st.lists(st.integers(0, 300), max_size=8),
    discount=st.sampled_from([0.0, 0.5, 0.9, 0.999, 1.0]) | st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
@example(lengths=[], discount=1.0, seed=0)
@example(lengths=[0, 0], discount=1.0, seed=0)
@example(lengths=[1], discount=0.5, seed=0)
@example(lengths=[0, 1, 0, 2, 0], discount=0.5, seed=0)
@settings(deadline=None, max_examples=150)
def test_equals_the_recurrence(lengths: list[int], discount: float, seed: int) -> None:
    exact = random_values(lengths, seed, torch.float64)
    got = reverse_discounted_cumsum_(exact.clone(), offsets_of(lengths), discount)
    torch.testing.assert_close(got, slow_sums(exact, lengths, discount), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.9, 0.99, 0.9999, 1.0])
def test_float32_is_accurate_at_32768_steps(discount: float) -> None:
    lengths = [32768, 5, 4096]
    values = random_values(lengths, seed=1)
    want = slow_sums(values, lengths, discount)
    got = reverse_discounted_cumsum_(values.clone(), offsets_of(lengths), discount)
    assert (got.double() - want).abs().max() <= 1e-6 * want.abs().max()


def test_returns_its_argument_overwritten() -> None:
    values = torch.ones(3)
    assert reverse_discounted_cumsum_(values, torch.tensor([0, 3]), 0.5) is values
    assert values.tolist() == [1.75, 1.5, 1.0]


@given(
    lengths=st.lists(st.sampled_from([0, 1, 63, 64, 65, 128, 129, 130, 200]), min_size=1, max_size=9),
    discount=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
@example(lengths=[64, 64, 192], discount=1.0, seed=0)
@example(lengths=[129], discount=1.0, seed=0)
@example(lengths=[1, 1, 1, 200, 1], discount=0.5, seed=0)
@settings(deadline=None, max_examples=60)
def test_sequences_that_end_anywhere_in_a_block(lengths: list[int], discount: float, seed: int) -> None:
    """Neighbouring sequences differ by a hundred orders of magnitude, so a leak between them would show."""
    parts = random_values(lengths, seed, torch.float64).split(lengths)
    values = torch.cat([part * 1e100 if i % 2 else part for i, part in enumerate(parts)])
    want = slow_sums(values, lengths, discount)
    got = reverse_discounted_cumsum_(values.clone(), offsets_of(lengths), discount)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    forwards = discounted_cumsum(values.flip(0), offsets_of(lengths[::-1]), discount)
    torch.testing.assert_close(forwards.flip(0), want, rtol=1e-9, atol=1e-12)


@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=8), seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=60)
def test_a_coefficient_for_each_step(lengths: list[int], seed: int) -> None:
    values = random_values(lengths, seed, torch.float64)
    offsets = offsets_of(lengths)
    coefficients = torch.rand(len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    coefficients[last_indices(offsets)] = 0
    want, running = [], 0.0
    for x, a in zip(reversed(values.tolist()), reversed(coefficients.tolist()), strict=True):
        running = x + a * running
        want.append(running)
    got = reverse_linear_scan_(values, coefficients, longest_of(offsets))
    assert got is values
    torch.testing.assert_close(got, torch.tensor(want[::-1], dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_following() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert following(values, torch.tensor([0, 0, 3, 4])).tolist() == [2.0, 3.0, 0.0, 0.0]
    assert longest_of(torch.tensor([0, 0, 3, 4])) == 3
    assert longest_of(torch.tensor([0])) == 0


@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    discount=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=50)
def test_nothing_leaks_between_sequences(lengths: list[int], discount: float, seed: int) -> None:
    values = random_values(lengths, seed)
    parts = values.split(lengths)
    loud = torch.cat([part * 1e30 if i % 2 else part for i, part in enumerate(parts)])
    together = reverse_discounted_cumsum_(loud, offsets_of(lengths), discount).split(lengths)
    for part, sums in list(zip(parts, together, strict=True))[::2]:
        alone = reverse_discounted_cumsum_(part.clone(), torch.tensor([0, len(part)]), discount)
        assert torch.equal(sums, alone)


class CountOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_work_grows_with_the_logarithm_of_the_length() -> None:
    counts = []
    for length in (2**10, 2**15):
        with CountOperations() as operations:
            reverse_discounted_cumsum_(torch.ones(3 * length), torch.arange(4) * length, 1.0)
        counts.append(operations.count)
    per_pass = (counts[1] - counts[0]) / 5
    assert per_pass <= 10, counts  # the counts include views


def test_last_indices_skip_empty_sequences() -> None:
    assert last_indices(torch.tensor([0, 0, 3, 3, 4, 4])).tolist() == [2, 3]
