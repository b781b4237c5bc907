"""Training batches in the controller: which is next, and its data asked for ahead of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tandem.data.loader import BatchOrder, other_data, saved_rows
from tandem.runtime import BatchFuture, Future, WorkerGroup
from tandem.workers.data import DataFacts


class Prompts(BatchOrder):
    """The batches of the data workers in their order. The state is how many were used, and which prompts were
    given back: what was asked for ahead is asked for again after a resume.

    Args:
        data: the group that makes a batch of its number.
        facts: what it found in the data.
        batch_size: see `BatchOrder`.
        shuffle, seed, mixture: what fixes the order; a checkpoint goes on with the same alone.
        drawn: whether a sampler there draws the batches; then none is asked for ahead, for what is observed
            of a batch may change the next.
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
        self._told: Future[None] | None = None

    def next(self) -> BatchFuture:
        """The next batch, which is used by that; the one after it is asked for. Prompts that were given back
        come first; of the batch that fills up such a one, the rest waits in turn."""
        recalled, self._waiting = self._waiting[: self.batch_size], self._waiting[self.batch_size :]
        if len(recalled) == self.batch_size:
            return self._recall(recalled)
        if self._ahead is not None and self._ahead[0] == self.used:
            batch = self._ahead[1]
        else:
            self._await_told()
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
        """Prompts of a batch that were not learnt from; they come first in the next."""
        uids = self._uids(batch)
        self._waiting = [uids[row] for row in rows] + self._waiting

    def observe(self, samples: BatchFuture, scores: BatchFuture) -> None:
        """Tells the sampler, if there is one, how prompts were answered; the values go to it directly."""
        if self._drawn:
            self._await_told()
            self._told = self._data.observe(samples.select("index").union(scores.select("scores")))

    def state_dict(self) -> dict[str, Any]:
        """See `BatchOrder`; with it the rows' digest, the prompts given back, and the sampler's state."""
        self._await_told()
        drawn = {"sampler": self._data.sampler_state()} if self._drawn else {}
        return {**super().state_dict(), "digest": self._digest, "waiting": list(self._waiting), **drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `BatchOrder`.

        Raises:
            DataError: it is the state of a run with a sampler and this has none, or the other way round; or
                the rows of that run are not the first of this.
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

    def _await_told(self) -> None:
        """Brings what the sampler raised to light before anything else is asked of it."""
        if self._told is not None:
            self._told.get()
            self._told = None

    @staticmethod
    def _uids(batch: BatchFuture) -> list[str]:
        uids = batch.index.uids
        assert uids is not None, "prompts have uids"
        return [str(uid) for uid in uids]
