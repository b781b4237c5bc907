"""Training batches in the controller: choose the next batch, and request its data ahead of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tandem.data.loader import BatchOrder, other_data, saved_rows
from tandem.runtime import BatchFuture, Future, WorkerGroup
from tandem.workers.data import DataFacts


class Prompts(BatchOrder):
    """The iterator over the training batches, which the data worker reads.

    A checkpoint stores how many batches were used and which prompts were returned unused. Data that was
    requested ahead of time is requested again after a resume.

    Args:
        data: The worker group that returns the batch with a given number.
        facts: The facts about the data that this group found, such as the number of rows.
        batch_size: The number of rows per batch.
        shuffle: Whether to shuffle the rows in each epoch. You cannot change this setting, `seed` or
            `mixture` when you resume from a checkpoint.
        seed: The seed of the shuffles.
        mixture: A dict from data source to its weight in each batch; see `BatchOrder`.
        drawn: Whether a sampler in the data worker draws the batches. Then no batch is requested ahead of
            time, because the results of one batch can change the next.
    """

    def __init__(
        self,
        data: WorkerGroup,
        facts: DataFacts,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        mixture: Mapping[str, float] | None = None,
        drawn: bool = False,
    ) -> None:
        weights = dict(mixture) if mixture else None
        super().__init__(facts.rows, batch_size, seed=seed, shuffle=shuffle, mixture=weights)
        self._data = data
        self._digest = facts.digest
        self._drawn = drawn
        self._ahead: tuple[int, BatchFuture] | None = None
        self._waiting: list[str] = []
        self._observation: Future[None] | None = None

    def next(self) -> BatchFuture:
        """Return the next batch, count it as used, and request the one after it.

        Prompts that were returned with `give_back` come first. If they do not fill the batch, prompts of a
        new batch fill it. The remaining prompts of the new batch wait for the next call.
        """
        recalled, self._waiting = self._waiting[: self.batch_size], self._waiting[self.batch_size :]
        if len(recalled) == self.batch_size:
            return self._recall(recalled)
        if self._ahead is not None and self._ahead[0] == self.used:
            batch = self._ahead[1]
        else:
            self._await_observation()
            batch = self._data.train_batch(self.used)
        self.used += 1
        if not self._drawn:
            self._ahead = (self.used, self._data.train_batch(self.used))
        if not recalled:
            return batch
        room = self.batch_size - len(recalled)
        self._waiting += self._uids(batch)[room:]
        return BatchFuture.concat([self._recall(recalled), batch.rows(slice(room))])

    def give_back(self, batch: BatchFuture, rows: Iterable[int]) -> None:
        """Put prompts of a batch that training did not use at the start of the next batch."""
        uids = self._uids(batch)
        self._waiting = [uids[row] for row in rows] + self._waiting

    def observe(self, samples: BatchFuture, scores: BatchFuture) -> None:
        """Send the samples and scores to the data worker's sampler, if the run has a sampler."""
        if self._drawn:
            self._await_observation()
            self._observation = self._data.observe(samples.select("index").union(scores.select("scores")))

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save.

        It holds the order of the rows, their digest, the prompts that are not used yet, and the sampler's
        state.
        """
        self._await_observation()
        drawn = {"sampler": self._data.sampler_state()} if self._drawn else {}
        return {**super().state_dict(), "digest": self._digest, "waiting": list(self._waiting), **drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            DataError: Only one of the two runs has a sampler, or this run's rows do not start with the rows
                of the saved run.
        """
        if self._drawn != ("sampler" in state):
            names = {True: "a sampler's draws", False: "the order of data.shuffle and data.seed"}
            field = "data.sampler.class_name"
            raise other_data(field=field, got=names[self._drawn], expected=names["sampler" in state])
        super().load_state_dict(state)
        then = saved_rows(state)
        if state.get("digest") not in (None, self._data.digest(then)):
            raise other_data(
                got=f"{self.stretches[-1].rows} rows, whose first {then} are not those of the checkpoint",
                expected="the same prompts in the same order; further rows at the end join in the next epoch",
            )
        self._ahead = None
        if not self._drawn:
            self._data.grow(self.stretches)
        self._waiting = list(state.get("waiting", ()))
        if self._drawn:
            self._data.load_sampler_state(state["sampler"])

    def _recall(self, uids: list[str]) -> BatchFuture:
        recalled: BatchFuture = self._data.recall(tuple(uids))
        return recalled

    def _await_observation(self) -> None:
        """Wait for the last `observe` call. If it failed, raise its error before the next call."""
        if self._observation is not None:
            self._observation.get()
            self._observation = None

    @staticmethod
    def _uids(batch: BatchFuture) -> list[str]:
        uids = batch.index.uids
        assert uids is not None, "prompts have uids"
        return [str(uid) for uid in uids]
