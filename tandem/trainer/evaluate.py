"""Validation: generate with the validation's own sampling settings, score, report."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, SamplingParams
from tandem.runtime import BatchFuture, WorkerGroup


class Evaluator:
    """Runs the validation set.

    Args:
        batches: gives the validation set's batches, anew at each call.
        actor, reward, batch: worker groups that generate, score and measure.
        n: samples per prompt.
        params: how to sample.
        writes_samples: whether samples go into the run folder.
    """

    def __init__(
        self,
        batches: Callable[[], Iterable[DataProto]],
        *,
        actor: WorkerGroup,
        reward: WorkerGroup,
        batch: WorkerGroup,
        n: int,
        params: SamplingParams,
        writes_samples: bool,
    ) -> None:
        self.batches = batches
        self.actor = actor
        self.reward = reward
        self.batch = batch
        self.n = n
        self.params = params
        self.writes_samples = writes_samples

    def run(self, step: int) -> dict[str, float]:
        """`val/accuracy` and `val/reward`, over all problems and per data source."""
        parts: list[Metrics] = []
        for number, prompts in enumerate(self.batches()):
            batch: BatchFuture = self.actor.generate_sequences(prompts, self.n, self.params)
            batch = batch.union(self.reward.compute_rewards(batch))
            parts.append(self.batch.measure_validation(batch))
            if self.writes_samples:
                self.batch.write_samples(step, batch, part=f"val{number or ''}")
        # What the engine counted and timed here must not be charged to the next training step.
        self.actor.take_observed()
        self.actor.take_timings()
        return Metrics.merged(parts).to_floats()
