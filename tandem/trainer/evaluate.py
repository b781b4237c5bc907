"""Validation: generate with the validation's own sampling settings, score, report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tandem.observability.metrics import Metrics
from tandem.protocol import SamplingParams
from tandem.runtime import BatchFuture, Future
from tandem.trainer.dealing import Dealer
from tandem.trainer.roles import Roles


@dataclass(frozen=True)
class Evaluator:
    """Runs the validation set.

    Attributes:
        batches: how many batches it has.
        n: samples per prompt.
        params: how to sample.
        writes_samples: whether samples go into the run folder.
        dealer: knows how long the responses to each problem were.
    """

    batches: int
    n: int
    params: SamplingParams
    writes_samples: bool
    dealer: Dealer = field(default_factory=Dealer)

    def run(self, step: int, roles: Roles) -> dict[str, float]:
        """`val/accuracy` and `val/reward`, over all problems and per data source."""
        measured: list[Future[Metrics]] = []
        written: list[Future[Any]] = []
        answered: list[tuple[BatchFuture, BatchFuture]] = []
        for number in range(self.batches):
            prompts = roles.data.val_batch(number)
            samples, scores = roles.generate(prompts, self.n, self.params, self.dealer)
            answered.append((prompts, samples))
            batch = samples.union(scores)
            measured.append(roles.batch.measure_validation(batch))
            if self.writes_samples:
                written.append(roles.batch.write_samples(step, batch, part=f"val{number or ''}"))
        metrics = Metrics.merged(future.get() for future in measured).to_floats()
        for future in written:
            future.get()
        for prompts, samples in answered:
            self.dealer.learn(prompts.index, samples.index)
        return metrics
