"""Batches of a dataset, in an order that a seed fixes and a checkpoint can continue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from tandem.errors import DataError
from tandem.protocol import DataProto


class Dataset(Protocol):
    """Anything that makes a table of some of its rows."""

    def __len__(self) -> int: ...

    def batch(self, rows: Sequence[int], *, uid_prefix: str) -> DataProto: ...


class BatchLoader:
    """Endless batches of equal size; each epoch goes once through the dataset in an order of its
    own and leaves out the rows that do not fill a batch.

    Args:
        dataset: where rows come from.
        batch_size: rows per batch.
        shuffle: a random order, another in each epoch; false keeps the dataset's.
        seed: fixes the orders of all epochs.

    Attributes:
        epoch: the epoch of the last batch, from 0.
        position: rows of this epoch already given out.

    Raises:
        DataError: the dataset has fewer rows than one batch.
    """

    def __init__(self, dataset: Dataset, batch_size: int, *, shuffle: bool, seed: int) -> None:
        if not 1 <= batch_size <= len(dataset):
            raise DataError(
                "the training data do not fill one batch",
                field="data.train_batch_size",
                got=f"batch size {batch_size}, {len(dataset)} row(s) of data",
                expected=f"a batch size from 1 to {len(dataset)}",
                remedy="lower data.train_batch_size (and ppo_mini_batch_size), or give more data",
            )
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        self.batch_size = batch_size
        self.epoch = 0
        self.position = 0
        self._order = self._epoch_order()

    @property
    def steps_per_epoch(self) -> int:
        return len(self._dataset) // self.batch_size

    def next(self) -> DataProto:
        """The next `batch_size` rows."""
        if self.position + self.batch_size > len(self._dataset):
            self.epoch += 1
            self.position = 0
            self._order = self._epoch_order()
        rows = self._order[self.position : self.position + self.batch_size]
        self.position += self.batch_size
        return self._dataset.batch(rows.tolist(), uid_prefix=str(self.epoch))

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on after the last batch given out."""
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken.

        Raises:
            DataError: it is the state of other data, another seed or another order.
        """
        identity = self._identity()
        saved = {name: state.get(name) for name in identity}
        if saved != identity:
            raise DataError(
                "the checkpoint continues another order of the data",
                got=", ".join(f"{name} {value}" for name, value in identity.items()),
                expected=", ".join(f"{name} {value}" for name, value in saved.items()),
                remedy="resume with the data files, filter, data.shuffle and data.seed of the first run, "
                "or start anew with trainer.resume_mode=disable",
            )
        self.epoch = int(state["epoch"])
        self.position = int(state["position"])
        self._order = self._epoch_order()

    def _identity(self) -> dict[str, Any]:
        return {"seed": self._seed, "shuffle": self._shuffle, "rows": len(self._dataset)}

    def _epoch_order(self) -> np.ndarray:
        rows = np.arange(len(self._dataset))
        if not self._shuffle:
            return rows
        return np.random.Generator(np.random.PCG64([self._seed, self.epoch])).permutation(rows)


def all_batches(
    dataset: Dataset, batch_size: int | None = None, *, uid_prefix: str = "val"
) -> Iterator[DataProto]:
    """Every row once, in order; None gives one batch of all, and the last batch may be smaller."""
    size = batch_size or len(dataset)
    for start in range(0, len(dataset), size):
        rows = range(start, min(start + size, len(dataset)))
        yield dataset.batch(rows, uid_prefix=uid_prefix)
