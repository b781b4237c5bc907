"""Batches of a dataset, in an order that a seed fixes and a checkpoint can continue."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from tandem.errors import DataError
from tandem.protocol import DataProto


class Dataset(Protocol):
    """Anything that makes a table of some of its rows."""

    def __len__(self) -> int: ...

    def batch(self, rows: Sequence[int], *, uid_prefix: str) -> DataProto: ...


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
    """The rows of each batch: batches of equal size without end; each epoch goes once through the
    dataset in an order of its own and leaves out the rows that do not fill a batch. A batch's rows are a
    function of its number alone; what is counted is how many batches were used.

    Args:
        rows: of the dataset.
        batch_size: rows per batch.
        shuffle: a random order, another in each epoch; false keeps the dataset's.
        seed: fixes the orders of all epochs.
        field: the config key of the batch size, for messages.

    Attributes:
        used: batches used, which is the number of the next one.

    Raises:
        DataError: the dataset has fewer rows than one batch.
    """

    def __init__(
        self, rows: int, batch_size: int, *, shuffle: bool, seed: int, field: str = "data.train_batch_size"
    ) -> None:
        self._identity = {"seed": seed, "shuffle": shuffle, "rows": rows}
        self._permutation: tuple[int, np.ndarray] | None = None
        self.batch_size = batch_size
        self.steps_per_epoch = batches_of(rows, batch_size, field=field)
        self.used = 0

    @property
    def epoch(self) -> int:
        """The epoch of the last batch used, from 0."""
        return max(self.used - 1, 0) // self.steps_per_epoch

    @property
    def position(self) -> int:
        """Rows of that epoch used so far."""
        return (self.used - self.epoch * self.steps_per_epoch) * self.batch_size

    def rows(self, number: int) -> tuple[int, np.ndarray]:
        """The epoch of a batch, and the numbers of its rows."""
        epoch, place = divmod(number, self.steps_per_epoch)
        start = place * self.batch_size
        return epoch, self._order(epoch)[start : start + self.batch_size]

    def state_dict(self) -> dict[str, Any]:
        """The state from which `load_state_dict` goes on after the last batch used."""
        return {"epoch": self.epoch, "position": self.position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken; with another batch size, at the next batch that repeats no row.

        Raises:
            DataError: it is the state of other data, another seed or another order.
        """
        saved = {name: state.get(name) for name in self._identity}
        if saved != self._identity:
            raise DataError(
                "the checkpoint continues another order of the data",
                got=", ".join(f"{name} {value}" for name, value in self._identity.items()),
                expected=", ".join(f"{name} {value}" for name, value in saved.items()),
                remedy="resume with the data files, filter, data.shuffle and data.seed of the first run, "
                "or start anew with trainer.resume_mode=disable",
            )
        batches = min(-(-int(state["position"]) // self.batch_size), self.steps_per_epoch)
        self.used = int(state["epoch"]) * self.steps_per_epoch + batches

    def _order(self, epoch: int) -> np.ndarray:
        if self._permutation is None or self._permutation[0] != epoch:
            rows = np.arange(self._identity["rows"])
            if self._identity["shuffle"]:
                generator = np.random.Generator(np.random.PCG64([self._identity["seed"], epoch]))
                rows = generator.permutation(rows)
            self._permutation = epoch, rows
        return self._permutation[1]


class BatchLoader(BatchOrder):
    """The batches of a dataset in that order.

    Args:
        dataset: where rows come from.
        batch_size, shuffle, seed, field: see `BatchOrder`.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        field: str = "data.train_batch_size",
    ) -> None:
        super().__init__(len(dataset), batch_size, shuffle=shuffle, seed=seed, field=field)
        self._dataset = dataset

    def batch(self, number: int) -> DataProto:
        """A batch by its number, from 0."""
        epoch, rows = self.rows(number)
        return self._dataset.batch(rows.tolist(), uid_prefix=str(epoch))

    def next(self) -> DataProto:
        """The next batch, which is used by that."""
        self.used += 1
        return self.batch(self.used - 1)


class EveryRow:
    """Batches that hold every row once, in the dataset's order; the last may be smaller.

    Args:
        dataset: where rows come from.
        batch_size: rows per batch; None gives one batch of all.
        uid_prefix: see the dataset.
    """

    def __init__(self, dataset: Dataset, batch_size: int | None = None, *, uid_prefix: str = "val") -> None:
        self._dataset = dataset
        self._size = batch_size or len(dataset)
        self._uid_prefix = uid_prefix

    def __len__(self) -> int:
        return math.ceil(len(self._dataset) / self._size)

    def __getitem__(self, number: int) -> DataProto:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = number * self._size
        rows = range(start, min(start + self._size, len(self._dataset)))
        return self._dataset.batch(rows, uid_prefix=self._uid_prefix)

    def __iter__(self) -> Iterator[DataProto]:
        return map(self.__getitem__, range(len(self)))
