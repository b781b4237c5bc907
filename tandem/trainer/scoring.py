"""The controller's part of scoring: combine the scores of reward functions and reward models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.rewards.combination import Combination, Running
from tandem.runtime import BatchFuture, Future, WorkerGroup


class Scoring:
    """Computes the reward of a run's samples, and keeps the statistics that normalize scores.

    The statistics cover all samples that were scored in training. The samples of a batch are included before
    the scores of this batch are normalized.

    Args:
        combination: How the scores of functions and models are combined; None if the run has no reward
            models.
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
        """Return `scores`, `token_level_scores`, `reward_extra`, `reward_why` and `response_text` of samples.

        Args:
            samples: The samples.
            functions: The scores of reward functions; None if there are no reward functions.
            models: A dict from role to the group of a reward model.
            batch: The group that combines the scores.
            learns: Whether the run learns from the samples, so that the statistics include their scores.
        """
        if self._combination is None:
            assert functions is not None, "a run without reward models has reward functions"
            return functions
        named = {role.rpartition(".")[2]: model for role, model in models.items()}
        asked = [named[part.name] for part in self._combination.parts if part.functions is None]
        scores = [] if functions is None else [functions]
        scores += [model.compute_rm_score(samples) for model in asked]
        if learns and self._combination.normalises:
            self._running = batch.running_scores(self._running, self._combination, *scores)
        given = samples.select("response_mask", "index")
        combined: BatchFuture = batch.combine_scores(given, self._running, self._combination, *scores)
        return combined

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics for a checkpoint, as JSON-like values."""
        if isinstance(self._running, Future):
            self._running = self._running.get()
        return {name: list(statistics) for name, statistics in self._running.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the statistics that `state_dict` returned."""
        self._running = {name: Running(*numbers) for name, numbers in state.items()}
