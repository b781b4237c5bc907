"""Batches of a dataset, in an order that depends on a seed and that a checkpoint can resume."""

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
"""The prefix of row numbers in uids: one text for all rows, or one number per row."""


class Dataset(Protocol):
    """The interface of a dataset: it returns a batch of the rows with given numbers.

    Attributes:
        digests: (N) uint64, one digest per row. Equal rows have equal digests.
    """

    digests: np.ndarray

    def __len__(self) -> int: ...

    def batch(self, rows: Sequence[int], *, uid_prefix: Prefix) -> DataProto: ...


def uids(prefix: Prefix, numbers: Sequence[int]) -> list[str]:
    """Return "{prefix}-{number}" for each row."""
    each = [prefix] * len(numbers) if isinstance(prefix, str) else prefix
    return [f"{before}-{number}" for before, number in zip(each, numbers, strict=True)]


def batches_of(rows: int, batch_size: int, *, field: str = "data.train_batch_size") -> int:
    """Return the number of complete batches in an epoch.

    Args:
        rows: The rows of the dataset.
        batch_size: Rows per batch.
        field: The config key of the batch size, for the message.

    Raises:
        DataError: The dataset has fewer rows than one batch.
    """
    if not 1 <= batch_size <= rows:
        raise DataError(
            "the training data do not fill one batch",
            field=field,
            got=f"batch size {batch_size}, {rows} row(s) of data",
            expected=f"a batch size from 1 to {rows}",
            remedy=f"lower {field} (and ppo_mini_batch_size), or add more data",
        )
    return rows // batch_size


class BatchOrder:
    """The assignment of positions in an epoch to batches.

    All batches have the same size, and the sequence of batches is endless. Each epoch passes once through the
    positions and leaves out the positions at the end that do not fill a batch. The positions of a batch
    depend only on the batch's number. The only state is the number of batches used so far.

    Args:
        rows: The rows of the dataset.
        batch_size: Rows per batch.
        field: The config key of the batch size, for messages.
        settings: A dict from name to value of all other settings that determine the order of rows.
            `load_state_dict` checks that the settings have not changed.

    Attributes:
        used: The number of batches used, which is also the number of the next batch.
        stretches: For each epoch at which the dataset grew (between a run and its resume): the epoch and the
            number of rows from then on. The last entry has all rows.

    Raises:
        DataError: The dataset has fewer rows than one batch.
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
        """The epoch of the last used batch, from 0."""
        return self._place(max(self.used - 1, 0))[1]

    @property
    def position(self) -> int:
        """The number of rows of the current epoch that were used so far."""
        return (self._place(self.used - 1)[2] + 1) * self.batch_size if self.used else 0

    def _place(self, number: int) -> tuple[int, int, int]:
        """Return the index of a batch's stretch, the batch's epoch, and its number in the epoch."""
        firsts = [self._first(each.epoch) for each in self.stretches]
        at = bisect_right(firsts, number) - 1
        epochs, place = divmod(number - firsts[at], self.stretches[at].rows // self.batch_size)
        return at, self.stretches[at].epoch + epochs, place

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the order after the last used batch, for a checkpoint."""
        stretches = [list(stretch) for stretch in self.stretches]
        return {"epoch": self.epoch, "position": self.position, **self._settings, "stretches": stretches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, so that the order continues after the last used batch.

        If the batch size has changed, continue at the first batch that repeats no row. If rows were added to
        the dataset, they are used from the next epoch on.

        Raises:
            DataError: The state was saved with more rows, or with other settings of the order.
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
        """Return the number of an epoch's first batch."""
        ends = [*(each.epoch for each in self.stretches[1:]), epoch]
        return sum(
            max(0, min(end, epoch) - each.epoch) * (each.rows // self.batch_size)
            for each, end in zip(self.stretches, ends, strict=True)
        )


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)


def saved_rows(state: dict[str, Any]) -> int:
    """Return the number of rows that the dataset had when the state was saved."""
    return int(state["stretches"][-1][1] if "stretches" in state else state["rows"])


def other_data(**facts: str) -> DataError:
    """Return the error for a checkpoint that cannot continue because the data differ."""
    return DataError(
        "the checkpoint belongs to another order of the data",
        remedy="resume with the data files, filter, data.shuffle, data.seed and data.mixture of the first "
        "run, or start over with trainer.resume_mode=disable",
        **facts,
    )


class BatchLoader(BatchOrder):
    """The batches of a dataset in a given order.

    Args:
        dataset: The dataset of the rows.
        batch_size: Rows per batch.
        order: The order of the rows.
        field: The config key of the batch size, for messages.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, order: Order, *, field: str = "data.train_batch_size"
    ) -> None:
        super().__init__(len(dataset), batch_size, field=field)
        self._dataset, self._order = dataset, order

    def batch(self, number: int) -> DataProto:
        """Return the batch with the given number, counted from 0."""
        at, epoch, place = self._place(number)
        places = range(place * self.batch_size, (place + 1) * self.batch_size)
        passes, rows = self._order.draw(self.stretches[: at + 1], epoch, places)
        return self._dataset.batch(rows.tolist(), uid_prefix=passes.tolist())

    def next(self) -> DataProto:
        """Return the next batch and count it as used."""
        self.used += 1
        return self.batch(self.used - 1)


class EveryRow:
    """An iterable of batches that contain every row once, in the dataset's order.

    The last batch may be smaller.

    Args:
        dataset: The dataset of the rows.
        batch_size: Rows per batch; None: all rows are one batch.
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
