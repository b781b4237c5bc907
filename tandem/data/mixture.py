"""The order of training rows: every row once per epoch, or fixed proportions of several sources."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from tandem.errors import DataError


class Stretch(NamedTuple):
    """A range of epochs in which the dataset had the same rows.

    From `epoch` on, the dataset consisted of the first `rows` rows of the current dataset.
    """

    epoch: int
    rows: int


class Order(Protocol):
    """The interface of an order: it maps each position of each epoch to a row."""

    def draw(self, stretches: Sequence[Stretch], epoch: int, places: range) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows at some positions of an epoch.

        Args:
            stretches: All stretches up to the stretch that contains the epoch.
            epoch: The epoch, from 0.
            places: Positions in the epoch, from 0 to below the number of rows of the stretch.

        Returns:
            passes (P) int64, a number that differs between all draws of the same row, and rows (P) int64.
        """
        ...


def permutation(key: Sequence[int], rows: int) -> np.ndarray:
    """Return the random permutation of 0 … rows-1, int64, that the key determines."""
    order: np.ndarray = np.random.Generator(np.random.PCG64(list(key))).permutation(rows)
    return order


class EpochOrder:
    """The order in which every row occurs once per epoch.

    Args:
        shuffle: Whether each epoch has a different random order; if False, the dataset's order is used.
        seed: The seed of the orders of all epochs.
    """

    def __init__(self, *, shuffle: bool, seed: int) -> None:
        self._shuffle, self._seed = shuffle, seed
        self._permutation = lru_cache(1)(permutation)

    def draw(self, stretches: Sequence[Stretch], epoch: int, places: range) -> tuple[np.ndarray, np.ndarray]:
        """Return passes and rows; see `Order.draw`."""
        rows = np.arange(places.start, places.stop)
        if self._shuffle:
            rows = self._permutation((self._seed, epoch), stretches[-1].rows)[rows]
        return np.full(len(rows), epoch), rows


class MixedOrder:
    """The order that mixes several sources in fixed proportions.

    Among the first n positions since the dataset last grew, each source has its proportion of n, rounded with
    the Sainte-Laguë method. The positions of a source are spread evenly. Within a source, all rows are used
    once before a row is repeated; then the source gets a new order.

    Args:
        weights: The weight of each source, in any unit.
        sources: (N) The source of each row, as an index into `weights`.
        shuffle: Whether each source's rows have a random order; if false, the dataset's order is used.
        seed: The seed of the random orders.

    Raises:
        DataError: A source has no rows.
    """

    def __init__(
        self, weights: Mapping[str, float], sources: np.ndarray, *, shuffle: bool, seed: int
    ) -> None:
        exact = [Fraction(repr(weight)) for weight in weights.values()]  # by its digits: 0.1 is exactly 1/10
        unit = math.lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * unit) for weight in exact]
        common = math.lcm(*self._weights)
        self._steps = [common // weight for weight in self._weights]
        self._rows = [np.flatnonzero(sources == place) for place in range(len(weights))]
        if missing := [name for name, rows in zip(weights, self._rows, strict=True) if not len(rows)]:
            raise DataError(
                "the training data have no rows of a source",
                field="data.mixture",
                got=missing[0],
                remedy="use the names in the column that data.reward_fn_key sets; `tandem data show FILE` "
                "lists them",
            )
        self._keys = [(seed, zlib.crc32(name.encode())) for name in weights]
        self._shuffle = shuffle
        self._permutation = lru_cache(2 * len(weights))(permutation)

    def draw(self, stretches: Sequence[Stretch], epoch: int, places: range) -> tuple[np.ndarray, np.ndarray]:
        """Return passes and rows; see `Order.draw`.

        The number of a pass counts the passes through the row's source.
        """
        began, rows = stretches[-1]
        start = (epoch - began) * rows
        first, last = (self._counts(start + place) for place in (places.start, places.stop))
        passes, drawn = [], []
        waits: list[int] = []
        for source, past in enumerate(self._passes(stretches)):
            numbers = np.arange(first[source], last[source])
            there = self._rows[source][: self._size(source, rows)]
            turns, at = np.divmod(numbers, len(there))
            for turn in np.unique(turns) if self._shuffle else ():
                now = turns == turn
                at[now] = self._permutation((*self._keys[source], past + int(turn)), len(there))[at[now]]
            passes.append(past + turns)
            drawn.append(there[at])
            waits += [(2 * number + 1) * self._steps[source] for number in numbers.tolist()]
        order = sorted(range(len(waits)), key=waits.__getitem__)
        return np.concatenate(passes)[order], np.concatenate(drawn)[order]

    def _size(self, source: int, rows: int) -> int:
        """Return the number of rows of a source among the first `rows` rows."""
        return int(np.searchsorted(self._rows[source], rows))

    def _counts(self, n: int) -> list[int]:
        """Return the number of positions of each source among the first n positions.

        The next position always goes to the source with the smallest (2 count + 1) / weight.
        """
        whole, so_far = sum(self._weights), max(0, n - len(self._weights))
        counts = [(2 * so_far * weight + whole) // (2 * whole) for weight in self._weights]
        while sum(counts) < n:
            waits = [(2 * count + 1) * step for count, step in zip(counts, self._steps, strict=True)]
            counts[waits.index(min(waits))] += 1
        return counts

    def _passes(self, stretches: Sequence[Stretch]) -> list[int]:
        """Return, for each source, the number of passes that were started in earlier stretches."""
        passes = [0] * len(self._weights)
        for (began, rows), (end, _) in pairwise(stretches):
            counts = self._counts((end - began) * rows)
            for source, count in enumerate(counts):
                passes[source] += -(-count // self._size(source, rows))
        return passes
