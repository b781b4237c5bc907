"""Training batches in the controller: which is next, and its data asked for ahead of time."""

from __future__ import annotations

from tandem.data.loader import BatchOrder
from tandem.runtime import BatchFuture, WorkerGroup


class Prompts(BatchOrder):
    """The batches of the data workers in their order. The state is how many were used: what was asked for
    ahead is asked for again after a resume.

    Args:
        data: the group that makes a batch of its number.
        rows, batch_size, shuffle, seed: see `BatchOrder`.
    """

    def __init__(self, data: WorkerGroup, rows: int, batch_size: int, *, shuffle: bool, seed: int) -> None:
        super().__init__(rows, batch_size, shuffle=shuffle, seed=seed)
        self._data = data
        self._ahead: tuple[int, BatchFuture] | None = None

    def next(self) -> BatchFuture:
        """The next batch, which is used by that; the one after it is asked for."""
        if self._ahead is not None and self._ahead[0] == self.used:
            batch = self._ahead[1]
        else:
            batch = self._data.train_batch(self.used)
        self.used += 1
        self._ahead = (self.used, self._data.train_batch(self.used))
        return batch
