import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.algorithms import scan
from tests.algorithms.batches import SEEDS, batches, offsets_of

BLOCK_EDGES = st.lists(st.sampled_from([0, 1, 63, 64, 65, 128, 129, 130, 200]), max_size=9)
DISCOUNTS = st.sampled_from([0.0, 0.01, 0.5, 0.9, 0.999, 1.0]) | st.floats(0, 1)


def slow_scan(values, coefficients):
    """Compute x_t + a_t y_{t+1} in float64, one value at a time."""
    out, running = [], 0.0
    for x, a in zip(reversed(values.tolist()), reversed(coefficients.tolist()), strict=True):
        running = x + a * running
        out.append(running)
    return torch.tensor(out[::-1], dtype=torch.float64)


def slow_sums(values, lengths, discount):
    parts = [slow_scan(row, torch.full_like(row, discount)) for row in values.double().split(lengths)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def random_values(lengths, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), generator=generator, dtype=torch.float64).to(dtype)


@given(lengths=BLOCK_EDGES | st.lists(st.integers(0, 300), max_size=8), discount=DISCOUNTS, seed=SEEDS)
@example(lengths=[], discount=1.0, seed=0)
@example(lengths=[0, 1, 0, 2, 0], discount=0.5, seed=0)
@example(lengths=[64, 64, 192], discount=1.0, seed=0)
@settings(deadline=None, max_examples=200)
def test_equals_the_recurrence_wherever_sequences_end(lengths, discount, seed):
    """Also with neighbours that differ by a hundred orders of magnitude, where a leak would show."""
    values = random_values(lengths, seed)
    got = scan.reverse_discounted_cumsum_(values.clone(), offsets_of(lengths), discount)
    torch.testing.assert_close(got, slow_sums(values, lengths, discount), rtol=1e-12, atol=1e-12)

    parts = [part * 1e100 if i % 2 else part for i, part in enumerate(values.split(lengths))]
    loud = torch.cat([*parts, values[:0]])
    want = slow_sums(loud, lengths, discount)
    got = scan.reverse_discounted_cumsum_(loud.clone(), offsets_of(lengths), discount)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    forwards = scan.discounted_cumsum(loud.flip(0), offsets_of(lengths[::-1]), discount)
    torch.testing.assert_close(forwards.flip(0), want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.9, 0.99, 0.9999, 1.0])
def test_float32_is_accurate_at_32768_steps(discount):
    lengths = [32768, 5, 4096]
    values = random_values(lengths, 1, torch.float32)
    want = slow_sums(values, lengths, discount)
    got = scan.reverse_discounted_cumsum_(values.clone(), offsets_of(lengths), discount)
    assert (got.double() - want).abs().max() <= 1e-6 * want.abs().max()


@batches(60, longest=300)
def test_a_coefficient_for_each_step(lengths, seed):
    values, offsets = random_values(lengths, seed), offsets_of(lengths)
    coefficients = torch.rand(len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    coefficients[scan.last_indices(offsets)] = 0
    want = slow_scan(values, coefficients)
    got = scan.reverse_linear_scan_(values, coefficients, scan.longest_of(offsets))
    assert got is values
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


class CountOperations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_work_grows_with_the_logarithm_of_the_length():
    counts = []
    for length in (2**10, 2**15):
        with CountOperations() as operations:
            scan.reverse_discounted_cumsum_(torch.ones(3 * length), torch.arange(4) * length, 1.0)
        counts.append(operations.count)
    assert (counts[1] - counts[0]) / 5 <= 10, counts  # per pass; the counts include views


def test_by_hand():
    values = torch.ones(3)
    assert scan.reverse_discounted_cumsum_(values, torch.tensor([0, 3]), 0.5) is values
    assert values.tolist() == [1.75, 1.5, 1.0]
    offsets = torch.tensor([0, 0, 3, 4])
    assert scan.following(torch.tensor([1.0, 2.0, 3.0, 4.0]), offsets).tolist() == [2.0, 3.0, 0.0, 0.0]
    assert (scan.longest_of(offsets), scan.longest_of(torch.tensor([0]))) == (3, 0)
    assert scan.last_indices(torch.tensor([0, 0, 3, 3, 4, 4])).tolist() == [2, 3]
