"""The order of training's rows: every row once an epoch, or shares of several sources."""

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
    """Epochs in which the dataset had the same rows: from `epoch` on the first `rows` of those it has now."""

    epoch: int
    rows: int


class Order(Protocol):
    """An order of rows without end, a function of the place alone."""

    def draw(self, stretches: Sequence[Stretch], epoch: int, places: range) -> tuple[np.ndarray, np.ndarray]:
        """The rows at some places of an epoch.

        Args:
            stretches: up to that of the epoch.
            epoch: from 0.
            places: from 0 to below the stretch's rows.

        Returns:
            passes (P) int64, a number that no two draws of a row share, and rows (P) int64.
        """
        ...


def permutation(key: Sequence[int], rows: int) -> np.ndarray:
    """(rows) int64: a random order that the key fixes."""
    order: np.ndarray = np.random.Generator(np.random.PCG64(list(key))).permutation(rows)
    return order


class EpochOrder:
    """Every row once an epoch.

    Args:
        shuffle: a random order, another in each epoch; false keeps the dataset's.
        seed: fixes the orders of all epochs.
    """

    def __init__(self, *, shuffle: bool, seed: int) -> None:
        self._shuffle, self._seed = shuffle, seed
        self._permutation = lru_cache(1)(permutation)

    def draw(self, stretches: Sequence[Stretch], epoch: int, places: range) -> tuple[np.ndarray, np.ndarray]:
        """See `Order`."""
        rows = np.arange(places.start, places.stop)
        if self._shuffle:
            rows = self._permutation((self._seed, epoch), stretches[-1].rows)[rows]
        return np.full(len(rows), epoch), rows


class MixedOrder:
    """Shares of several sources. Of the first n places since the data last grew, each source has n times its
    share, rounded by the method of Sainte-Laguë, and they are spread evenly. A source's rows come one after
    the other, all of them before one comes again, then in a new order.

    Args:
        weights: of each source, in any unit.
        sources: (N), the source of each row, as a number in the order of `weights`.
        shuffle: random orders of each source's rows; false keeps the dataset's.
        seed: fixes them.

    Raises:
        DataError: a source without rows.
    """

    def __init__(
        self, weights: Mapping[str, float], sources: np.ndarray, *, shuffle: bool, seed: int
    ) -> None:
        exact = [Fraction(repr(weight)) for weight in weights.values()]  # as they are written: 0.1 is a tenth
        unit = math.lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * unit) for weight in exact]
        common = math.lcm(*self._weights)
        self._steps = [common // weight for weight in self._weights]
        self._rows = [np.flatnonzero(sources == place) for place in range(len(weights))]
        if missing := [name for name, rows in zip(weights, self._rows, strict=True) if not len(rows)]:
            raise DataError(
                "a source that the training data do not have",
                field="data.mixture",
                got=missing[0],
                remedy="name the sources as the column of data.reward_fn_key does; `tandem data show FILE` "
                "lists them",
            )
        self._keys = [(seed, zlib.crc32(name.encode())) for name in weights]
        self._shuffle = shuffle
        self._permutation = lru_cache(2 * len(weights))(permutation)

    def draw(self, stretches: Sequence[Stretch], epoch: int, places: range) -> tuple[np.ndarray, np.ndarray]:
        """See `Order`; the passes count those through the row's source."""
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
        """A source's rows among the first `rows`."""
        return int(np.searchsorted(self._rows[source], rows))

    def _counts(self, n: int) -> list[int]:
        """How many of the first n places each source has: the next place goes to the source with the least
        (2 count + 1) / weight."""
        whole, so_far = sum(self._weights), max(0, n - len(self._weights))
        counts = [(2 * so_far * weight + whole) // (2 * whole) for weight in self._weights]
        while sum(counts) < n:
            waits = [(2 * count + 1) * step for count, step in zip(counts, self._steps, strict=True)]
            counts[waits.index(min(waits))] += 1
        return counts

    def _passes(self, stretches: Sequence[Stretch]) -> list[int]:
        """The passes through each source that earlier stretches began."""
        passes = [0] * len(self._weights)
        for (began, rows), (end, _) in pairwise(stretches):
            counts = self._counts((end - began) * rows)
            for source, count in enumerate(counts):
                passes[source] += -(-count // self._size(source, rows))
        return passes
