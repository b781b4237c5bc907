import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.balance import dealt, even, partition, within_budget
from tandem.errors import ConfigError

weights = st.lists(st.integers(0, 1000), max_size=40)


@given(weights, st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_every_item_is_in_exactly_one_set(items, parts):
    sets = partition(items, parts)
    assert len(sets) == parts
    assert sorted(itertools.chain(*sets)) == list(range(len(items)))
    assert all(rows == sorted(rows) for rows in sets)


def test_known_instance():
    # Karmarkar–Karp on 8 7 6 5 4 in two parts ends with a difference of 2: 16 and 14.
    sets = partition([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in rows) for rows in sets) == [14, 16]


def test_sums_differ_little_and_the_heaviest_set_comes_first():
    draw = random.Random(5)
    items = [draw.randint(100, 2000) for _ in range(512)]
    sets = partition(items, 8)
    totals = [sum(items[i] for i in rows) for rows in sets]
    assert totals == sorted(totals, reverse=True) and totals[0] - totals[-1] <= 4
    assert partition(list(items), 8) == sets


@pytest.mark.parametrize(("count", "parts"), [(4096, 8), (4096, 64), (32768, 32)])
def test_many_items_are_divided_quickly_and_at_most_one_item_apart(count, parts):
    draw = random.Random(count + parts)
    items = [draw.randint(1, 2048) for _ in range(count)]
    start = time.perf_counter()
    sets = partition(items, parts)
    assert time.perf_counter() - start < 0.5  # tens of milliseconds on an idle core
    assert sorted(itertools.chain(*sets)) == list(range(count))
    assert all(rows == sorted(rows) for rows in sets)
    totals = [sum(items[i] for i in rows) for rows in sets]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] - totals[-1] <= totals[0] / 1000  # the last items are light


def test_equal_few_and_no_items():
    assert [len(rows) for rows in partition([7] * 4097, 8)] == [513, *[512] * 7]
    assert partition([5, 2], 4) == [[0], [1], [], []]
    assert partition([], 2) == [[], []]


def test_even_slices():
    assert even(7, 4) == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 7)]
    assert even(1, 3) == [slice(0, 1), slice(1, 1), slice(1, 1)]


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(100, 300))
@settings(max_examples=100, deadline=None)
def test_budget_is_kept_and_sets_are_few(items, budget):
    sets = within_budget(items, budget)
    assert sorted(itertools.chain(*sets)) == list(range(len(items)))
    assert all(0 < sum(items[i] for i in rows) <= budget for rows in sets)
    assert len(sets) <= max(1, 2 * -(-sum(items) // budget)) or not items


def test_a_budget_with_a_number_of_sets():
    assert [len(within_budget([9, 8, 7, 6], 30, least)) for least in (1, 2, 3, 4, 9)] == [1, 2, 3, 4, 4]
    assert within_budget([9, 8, 7, 6], 30, 2) == [[0, 3], [1, 2]]
    assert within_budget([], 30, 2) == []


def test_what_cannot_be_divided():
    with pytest.raises(ConfigError, match="101 tokens"):
        within_budget([3, 101], 100)
    with pytest.raises(ConfigError, match="parts"):
        partition([1], 0)


@given(weights, st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_dealt_items_fill_sets_of_the_asked_sizes(items, parts):
    sizes = [span.stop - span.start for span in even(len(items), parts)]
    sets = dealt(items, sizes)
    assert [len(rows) for rows in sets] == sizes
    assert sorted(itertools.chain(*sets)) == list(range(len(items)))


def test_dealt_items_weigh_about_the_same():
    draw = random.Random(3)
    items = [draw.lognormvariate(6, 1) for _ in range(256)]
    totals = [sum(items[i] for i in rows) for rows in dealt(items, [64, 64, 64, 64])]
    in_order = [sum(items[i : i + 64]) for i in range(0, 256, 64)]
    assert max(totals) / min(totals) < 1.01 < max(in_order) / min(in_order)


def test_dealt_known_instance():
    # 9 goes to the first, 8 and 2 go to the second, which is then full, and 1 goes to the first.
    assert dealt([1, 9, 8, 2], [2, 2]) == [[0, 1], [2, 3]]
