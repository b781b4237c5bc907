import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import DataError
from tandem.protocol import Ragged
from tandem.protocol.gather import Gather
from tests.support.refusing import refused

rows_of_numbers = st.lists(st.lists(st.integers(-99, 99), max_size=5), max_size=8)


def ragged(rows):
    return Ragged.from_list(rows, dtype=torch.int64)


def listed(table):
    return [row.tolist() for row in table]


@given(rows_of_numbers, st.data())
@settings(max_examples=100, deadline=None)
def test_rows_by_slice_number_and_mask(rows, data):
    table = ragged(rows)
    start, stop = (data.draw(st.integers(-9, 9)) for _ in range(2))
    step = data.draw(st.sampled_from([None, 1, 2, -1]))
    assert listed(table[start:stop:step]) == rows[start:stop:step]
    numbers = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=9)) if rows else []
    assert listed(table[numbers]) == [rows[i] for i in numbers]
    assert listed(table[torch.tensor(numbers, dtype=torch.int32)]) == [rows[i] for i in numbers]
    mask = torch.tensor([bool(i % 2) for i in range(len(rows))], dtype=torch.bool)
    assert listed(table[mask]) == rows[1::2]


@given(st.lists(rows_of_numbers, min_size=1, max_size=4), st.data())
@settings(max_examples=100, deadline=None)
def test_gather_is_concatenation_then_rows(parts, data):
    tables = [ragged(rows) for rows in parts]
    whole = [row for rows in parts for row in rows]
    assert listed(Ragged.cat(tables)) == whole
    order = data.draw(st.permutations(range(len(whole))))
    plan = Gather([len(rows) for rows in parts], np.array(order, dtype=np.int64))
    assert listed(Ragged.gather(tables, plan)) == [whole[i] for i in order]


def test_long_rows_are_gathered_like_short_ones():
    lengths = torch.randint(150, 400, (40,))
    long = Ragged.from_lengths(torch.arange(int(lengths.sum())), lengths)
    order = torch.randperm(40)
    expected = [long.row(i).tolist() for i in order.tolist()]
    assert listed(long[order]) == expected
    assert listed(Ragged.gather([long[:13], long[13:]], Gather([13, 27], order.numpy()))) == expected
    wide = Ragged.from_lengths(long.values[:, None].repeat(1, 3), lengths)
    assert wide[order].values[:, 2].tolist() == [value for row in expected for value in row]


def test_successive_rows_are_views():
    table, other = ragged([[1, 2], [3], [], [4, 5]]), ragged([[7], [8], [9], []])
    for rows in (slice(1, 4), slice(0, 4), torch.arange(1, 3)):
        view = table[rows]
        assert view.values.data_ptr() in (table.values.data_ptr(), table.values[2:].data_ptr())
    plan = Gather([4, 4], range(4, 6))
    assert Ragged.gather([table, other], plan).values.data_ptr() == other.values.data_ptr()


def test_an_empty_part_does_not_change_the_type():
    empty, two = Ragged.from_list([[]]), ragged([[1, 2]])
    whole = Ragged.cat([empty, two, Ragged.from_list([], dtype=torch.float64)])
    assert listed(whole) == [[], [1, 2]] and whole.dtype == torch.int64
    parts, plan = [empty, ragged([[1, 2], [3]]), ragged([[4]])], Gather([1, 2, 1], np.array([2, 1, 3]))
    assert Ragged.gather(parts, plan).dtype == torch.int64
    found = Gather([0, 3, 2], np.array([4, 0, 2])).dense([torch.empty(0), torch.arange(3), torch.arange(2)])
    assert found.tolist() == [1, 0, 2] and found.dtype == torch.int64


def test_conversions():
    table = ragged([[1, 2, 3], [], [4]])
    padded = table.to_padded(-1)
    assert padded.tolist() == [[1, 2, 3], [-1, -1, -1], [4, -1, -1]]
    assert table.to_padded(0, length=4).shape == (3, 4)
    assert Ragged.from_padded(padded, padded >= 0).equal(table)
    assert Ragged.from_nested(table.to_nested()).equal(table) and table.row_ids().tolist() == [0, 0, 0, 2]
    assert table.positions().tolist() == [0, 1, 2, 0]
    assert listed(table.repeat_interleave(2)) == [[1, 2, 3], [1, 2, 3], [], [], [4], [4]]
    assert listed(table.with_values(table.values * 2)) == [[2, 4, 6], [], [8]]
    for wrong, kind, telling in (
        (lambda: table.to_padded(length=2), DataError, "padded length"),
        (lambda: table.row(3), IndexError, "row 3"),
        (lambda: table[[3]], IndexError, "3 rows"),
        (lambda: table[torch.tensor([True, False])], IndexError, r"mask of 2 .* 3 rows"),
    ):
        with pytest.raises(kind, match=telling):
            wrong()


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 4, 3], [], [0, 2, 1, 3]])
def test_offsets_that_do_not_fit(offsets):
    refused(DataError, lambda: Ragged(torch.arange(3), torch.tensor(offsets, dtype=torch.int64)), "offsets")


def test_equality_looks_at_values_only_where_it_must(monkeypatch):
    nan = float("nan")
    table, numbers = Ragged.from_list([[nan], [1.0, 2.0]]), ragged([[1], [2]])
    assert table.equal(Ragged(table.values.clone(), table.offsets))  # NaN equals NaN
    for rows in ([[1.0], [nan, 2.0]], [[0.0, 1.0], [2.0]]):
        assert not table.equal(Ragged.from_list(rows))
    assert numbers.equal(ragged([[1], [2]])) and not numbers.equal(ragged([[1], [3]]))
    assert not numbers.equal(Ragged.from_list([[1], [2]], dtype=torch.int32))
    monkeypatch.setattr(torch, "equal", lambda a, b: pytest.fail("values on the same memory were read"))
    assert table.equal(Ragged(table.values[:], table.offsets[:]))
