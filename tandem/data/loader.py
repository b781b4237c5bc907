"""Batches of a dataset, in an order that a seed fixes and a checkpoint can continue."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from tandem.data.mixture import Order, Stretch
from tandem.errors import DataError
from tandem.protocol import DataProto

Prefix = str | Sequence[int]
"""What stands before the rows' numbers in their uids: the same for all, or one each."""


class Dataset(Protocol):
    """Anything that makes a table of some of its rows.

    Attributes:
        digests: (N) uint64, of each row: two rows that are the same have the same.
    """

    digests: np.ndarray

    def __len__(self) -> int: ...

    def batch(self, rows: Sequence[int], *, uid_prefix: Prefix) -> DataProto: ...


def uids(prefix: Prefix, numbers: Sequence[int]) -> list[str]:
    """ "{prefix}-{number}" of each row."""
    each = [prefix] * len(numbers) if isinstance(prefix, str) else prefix
    return [f"{before}-{number}" for before, number in zip(each, numbers, strict=True)]


def batches_of(rows: int, batch_size: int, *, field: str = "data.train_batch_size") -> int:
    """The whole batches of an epoch.

    Args:
        field: the config key of the batch size, for the message.

    Raises:
        DataError: the dataset has fewer rows than one batch.
    """
    if not 1 <= batch_size <= rows:
        raise DataError(
            "the training data do not fill one batch",
            field=field,
            got=f"batch size {batch_size}, {rows} row(s) of data",
            expected=f"a batch size from 1 to {rows}",
            remedy=f"lower {field} (and ppo_mini_batch_size), or give more data",
        )
    return rows // batch_size


class BatchOrder:
    """The places of each batch: batches of equal size without end; each epoch goes once through the
    dataset's places and leaves out those that do not fill a batch. A batch's places are a function of its
    number alone; what is counted is how many batches were used.

    Args:
        rows: of the dataset.
        batch_size: rows per batch.
        field: the config key of the batch size, for messages.
        settings: what fixes the order of rows beside, as plain values by name; see `load_state_dict`.

    Attributes:
        used: batches used, which is the number of the next one.
        stretches: how many rows the dataset had from which epoch on, if it grew between a run and its
            continuation; the last has all.

    Raises:
        DataError: the dataset has fewer rows than one batch.
    """

    def __init__(
        self, rows: int, batch_size: int, *, field: str = "data.train_batch_size", **settings: Any
    ) -> None:
        self._settings = settings
        self.batch_size = batch_size
        self.steps_per_epoch = batches_of(rows, batch_size, field=field)
        self.stretches: tuple[Stretch, ...] = (Stretch(0, rows),)
        self.used = 0

    @property
    def epoch(self) -> int:
        """The epoch of the last batch used, from 0."""
        return self._place(max(self.used - 1, 0))[1]

    @property
    def position(self) -> int:
        """Rows of that epoch used so far."""
        return (self._place(self.used - 1)[2] + 1) * self.batch_size if self.used else 0

    def _place(self, number: int) -> tuple[int, int, int]:
        """Of a batch: the stretch, the epoch, and its number in the epoch."""
        firsts = [self._first(each.epoch) for each in self.stretches]
        at = bisect_right(firsts, number) - 1
        epochs, place = divmod(number - firsts[at], self.stretches[at].rows // self.batch_size)
        return at, self.stretches[at].epoch + epochs, place

    def state_dict(self) -> dict[str, Any]:
        """The state from which `load_state_dict` goes on after the last batch used."""
        stretches = [list(stretch) for stretch in self.stretches]
        return {"epoch": self.epoch, "position": self.position, **self._settings, "stretches": stretches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken; with another batch size, at the next batch that repeats no row.
        Rows that were added since come in from the next epoch on.

        Raises:
            DataError: it is the state of more rows, or of another order.
        """
        stretches = [Stretch(*each) for each in state.get("stretches") or [(0, state["rows"])]]
        rows, before = self.stretches[-1].rows, saved_rows(state)
        saved = {name: state.get(name) for name in self._settings}
        if saved != self._settings or rows < before:
            raise other_data(
                got=_listed({**self._settings, "rows": rows}), expected=_listed({**saved, "rows": before})
            )
        epoch, position = int(state["epoch"]), int(state["position"])
        if rows > before:
            begins = epoch + 1 if position else epoch
            stretches = [*(each for each in stretches if each.epoch < begins), Stretch(begins, rows)]
        self.stretches = tuple(stretches)
        first, following = self._first(epoch), self._first(epoch + 1)
        self.used = min(first + -(-position // self.batch_size), following)

    def _first(self, epoch: int) -> int:
        """The first batch of an epoch."""
        ends = [*(each.epoch for each in self.stretches[1:]), epoch]
        return sum(
            max(0, min(end, epoch) - each.epoch) * (each.rows // self.batch_size)
            for each, end in zip(self.stretches, ends, strict=True)
        )


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)


def saved_rows(state: dict[str, Any]) -> int:
    """The rows of the dataset when an order's state was taken."""
    return int(state["stretches"][-1][1] if "stretches" in state else state["rows"])


def other_data(**told: str) -> DataError:
    """The error of a checkpoint that goes on with other data."""
    return DataError(
        "the checkpoint continues another order of the data",
        remedy="resume with the data files, filter, data.shuffle, data.seed and data.mixture of the first "
        "run, or start anew with trainer.resume_mode=disable",
        **told,
    )


class BatchLoader(BatchOrder):
    """The batches of a dataset in an order.

    Args:
        dataset: where rows come from.
        batch_size, field: see `BatchOrder`.
        order: of its rows.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, order: Order, *, field: str = "data.train_batch_size"
    ) -> None:
        super().__init__(len(dataset), batch_size, field=field)
        self._dataset, self._order = dataset, order

    def batch(self, number: int) -> DataProto:
        """A batch by its number, from 0."""
        at, epoch, place = self._place(number)
        places = range(place * self.batch_size, (place + 1) * self.batch_size)
        passes, rows = self._order.draw(self.stretches[: at + 1], epoch, places)
        return self._dataset.batch(rows.tolist(), uid_prefix=passes.tolist())

    def next(self) -> DataProto:
        """The next batch, which is used by that."""
        self.used += 1
        return self.batch(self.used - 1)


class EveryRow:
    """Batches that hold every row once, in the dataset's order; the last may be smaller.

    Args:
        dataset: where rows come from.
        batch_size: rows per batch; None gives one batch of all.
    """

    def __init__(self, dataset: Dataset, batch_size: int | None = None) -> None:
        self._dataset = dataset
        self._size = batch_size or len(dataset)

    def __len__(self) -> int:
        return math.ceil(len(self._dataset) / self._size)

    def __getitem__(self, number: int) -> DataProto:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = number * self._size
        rows = range(start, min(start + self._size, len(self._dataset)))
        return self._dataset.batch(rows, uid_prefix="val")

    def __iter__(self) -> Iterator[DataProto]:
        return map(self.__getitem__, range(len(self)))
