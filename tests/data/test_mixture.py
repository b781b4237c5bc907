from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from tandem.data.mixture import MixedOrder, Stretch
from tandem.errors import DataError

NAMES = ("a", "b", "c")


def order_of(weights, counts, *, shuffle=True, seed=3):
    """Return rows 0, 1, … with alternating sources, as long as each source has rows."""
    places = [name for place in range(max(counts.values())) for name in counts if place < counts[name]]
    sources = np.array([list(weights).index(name) for name in places])
    return MixedOrder(weights, sources, shuffle=shuffle, seed=seed)


def sequence(shares, length):
    """Assign each place to the source with the smallest (2 count + 1) / share: the slow reference."""
    shares = {name: Fraction(repr(share)) for name, share in shares.items()}
    counts, found = Counter(dict.fromkeys(shares, 0)), []
    for _ in range(length):
        name = min(shares, key=lambda each: ((2 * counts[each] + 1) / shares[each], list(shares).index(each)))
        counts[name] += 1
        found.append(name)
    return found


@pytest.mark.parametrize(
    "weights",
    [{"a": 0.7, "b": 0.3}, {"a": 5, "b": 3, "c": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 0.01, "b": 9.0}],
)
@pytest.mark.parametrize("size", [1, 4, 10])
def test_every_batch_has_the_shares_of_sainte_lague(weights, size):
    counts = dict.fromkeys(weights, 40)
    order = order_of(weights, counts)
    rows = 40 * len(weights)
    expected = sequence(weights, rows)
    for start in range(0, rows - size + 1, size):
        _, drawn = order.draw([Stretch(0, rows)], 0, range(start, start + size))
        assert [list(weights)[row % len(weights)] for row in drawn] == expected[start : start + size]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_source_that_is_exhausted_comes_again_in_a_new_order(shuffle):
    order = order_of({"a": 1.0, "b": 1.0}, {"a": 30, "b": 4}, shuffle=shuffle)
    draws = [order.draw([Stretch(0, 34)], epoch, range(34)) for epoch in range(3)]
    passes, rows = (np.concatenate(part) for part in zip(*draws, strict=True))
    of_b = [(int(turn), int(row)) for turn, row in zip(passes, rows, strict=True) if row % 2 and row < 8]
    turns = [[row for _, row in of_b[start : start + 4]] for start in range(0, len(of_b), 4)]
    assert len(of_b) == 51 and all(sorted(turn) == [1, 3, 5, 7] for turn in turns[:-1])
    assert [turn for turn, _ in of_b] == [place // 4 for place in range(51)]
    assert len(set(zip(passes.tolist(), rows.tolist(), strict=True))) == 102  # no uid appears twice
    assert (len({tuple(turn) for turn in turns[:-1]}) > 3) == shuffle


def test_places_do_not_depend_on_how_they_are_asked_for():
    order = order_of({"a": 2.0, "b": 1.0}, {"a": 7, "b": 5})
    whole = [order.draw([Stretch(0, 12)], epoch, range(12))[1].tolist() for epoch in range(4)]
    fresh = order_of({"a": 2.0, "b": 1.0}, {"a": 7, "b": 5})
    pieces = [fresh.draw([Stretch(0, 12)], 2, range(start, start + 3))[1].tolist() for start in (9, 0, 6, 3)]
    assert [*pieces[1], *pieces[3], *pieces[2], *pieces[0]] == whole[2]
    other = order_of({"a": 2.0, "b": 1.0}, {"a": 7, "b": 5}, seed=4)
    assert other.draw([Stretch(0, 12)], 0, range(12))[1].tolist() != whole[0]


def test_of_data_that_grew_new_rows_come_in_with_the_epoch_and_no_uid_twice():
    small, large = {"a": 8, "b": 4}, {"a": 20, "b": 10}
    sources = np.array([0, 0, 1] * 10)
    order = MixedOrder({"a": 2.0, "b": 1.0}, sources, shuffle=True, seed=5)
    before = MixedOrder({"a": 2.0, "b": 1.0}, sources[:12], shuffle=True, seed=5)
    stretches = [Stretch(0, sum(small.values())), Stretch(2, sum(large.values()))]
    old = [order.draw(stretches[:1], epoch, range(12)) for epoch in range(2)]
    for epoch, (passes, rows) in enumerate(old):
        same = before.draw(stretches[:1], epoch, range(12))
        assert (passes.tolist(), rows.tolist()) == tuple(part.tolist() for part in same) and rows.max() < 12
    new = [order.draw(stretches, epoch, range(30)) for epoch in (2, 3)]
    assert sorted(new[0][1].tolist()) == list(range(30))
    drawn = [pair for passes, rows in old + new for pair in zip(passes.tolist(), rows.tolist(), strict=True)]
    assert len(set(drawn)) == len(drawn) == 84


def test_a_source_without_rows_is_refused():
    with pytest.raises(DataError, match=r"(?s)^data.mixture: .*got:      b"):
        MixedOrder({"a": 1.0, "b": 1.0}, np.zeros(4, int), shuffle=True, seed=0)
