"""The scores of samples on the controller: what reward functions and reward models say, and the reward made
of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.rewards.combination import Combination, Running
from tandem.runtime import BatchFuture, Future, WorkerGroup


class Scoring:
    """Makes the reward of a run's samples, and keeps the statistics by which scores are normalised: those of
    all samples scored in training, a batch's own included when it is scored.

    Args:
        combination: of the parts; None: reward functions alone say it.
    """

    def __init__(self, combination: Combination | None) -> None:
        self._combination = combination
        self._running: Mapping[str, Running] | Future[dict[str, Running]] = {}

    def reward(
        self,
        samples: BatchFuture,
        functions: BatchFuture | None,
        models: Mapping[str, WorkerGroup],
        batch: WorkerGroup,
        *,
        learns: bool,
    ) -> BatchFuture:
        """`scores`, `token_level_scores`, `reward_extra`, `reward_why`, `response_text` of samples.

        Args:
            functions: what reward functions say, if any are called.
            models: the groups of the reward models, by role.
            batch: makes one of all.
            learns: whether the samples are learnt from, so that their scores belong to the statistics.
        """
        if self._combination is None:
            assert functions is not None, "a run without reward models has reward functions"
            return functions
        named = {role.rpartition(".")[2]: model for role, model in models.items()}
        asked = [named[part.name] for part in self._combination.parts if part.functions is None]
        said = [] if functions is None else [functions]
        said += [model.compute_rm_score(samples) for model in asked]
        if learns and self._combination.normalises:
            self._running = batch.running_scores(self._running, self._combination, *said)
        given = samples.select("response_mask", "index")
        combined: BatchFuture = batch.combine_scores(given, self._running, self._combination, *said)
        return combined

    def state_dict(self) -> dict[str, Any]:
        """The statistics, as plain numbers."""
        if isinstance(self._running, Future):
            self._running = self._running.get()
        return {name: list(statistics) for name, statistics in self._running.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        self._running = {name: Running(*numbers) for name, numbers in state.items()}
