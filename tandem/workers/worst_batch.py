"""The largest micro-batches that updates can come to, run before the first of them, so that memory that does
not suffice is known at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.config.batching import Batching
from tandem.engines.train.base import Counts
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, Ragged
from tandem.workers.base import EngineWorker, micro_batching


class WorstBatch(NamedTuple):
    """The largest micro-batches of a rank.

    Attributes:
        rows: sequences in one.
        length: tokens of each.
        several: whether an update has more than one; two are run then, as gradients add up between them.
        on_cpu: whether it is run on a CPU too.
    """

    rows: int
    length: int
    several: bool
    on_cpu: bool


@dataclass(frozen=True, slots=True)
class _Discarded:
    """A loss of which nothing is learnt: the engine takes no step where nothing is left."""

    outputs: frozenset[str]
    columns: frozenset[str] = frozenset()

    def __call__(
        self, out: Mapping[str, Tensor], columns: Mapping[str, Tensor], offsets: Tensor, counts: Counts
    ) -> tuple[Tensor, Metrics]:
        metrics = Metrics()
        metrics.add_max("tokens", offsets[-1])
        return torch.stack([out[name].sum() for name in sorted(self.outputs)]).sum(), metrics

    def recount(self, metrics: Metrics, counts: Counts) -> float:
        return 0.0


def run_worst_batch(
    worker: EngineWorker, role: str, outputs: frozenset[str], batching: Batching, worst: WorstBatch
) -> None:
    """Runs forward and backward of the largest micro-batches, of one token over and over, without a step of
    the optimizer. Weights, moments, gradients, version and generators are afterwards what they were, bit for
    bit. Collective.

    Args:
        role: of the engine.
        outputs: of the model, that its loss reads.
        batching: of its updates.

    Raises:
        DeviceMemoryError: the memory of a GPU does not suffice.
    """
    if worker.device.type == "cpu" and not worst.on_cpu:
        return
    sequences = worst.rows * (2 if worst.several else 1)
    tokens = Ragged.from_list([[0] * worst.length] * sequences, dtype=torch.int64)
    mask = torch.ones(len(tokens.values), dtype=torch.bool)
    batch = DataProto({"tokens": tokens, "response_mask": tokens.with_values(mask)})
    devices = [worker.device] if worker.device.type == "cuda" else []
    loss = _Discarded(outputs - {"ref_kl"})  # which needs the reference's hidden states
    with (
        worker.timeline.phase("worst_batch"),
        torch.random.fork_rng(devices=devices),
        worker.on_device(worker.trained(), training=True),
    ):
        found = worker.trained().train_step(batch, loss, micro=micro_batching(batching)).to_floats()
    times = "twice, as gradients add up, " if worst.several else ""
    worker.say(f"{role}: the worst batch ran before the first step: {times}{found['tokens']:,.0f} tokens")
