"""A test run of the largest possible micro-batches before the first update.

If the memory is too small, the run fails immediately instead of after hours.
"""

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
    """The sizes of the largest micro-batches that a rank may get.

    Attributes:
        rows: The number of sequences in one micro-batch.
        length: The number of tokens of each sequence.
        several: Whether an update has more than one micro-batch. Then two micro-batches are run, because
            gradients are accumulated from one to the next.
        on_cpu: Whether to run the micro-batches on a CPU too.
    """

    rows: int
    length: int
    several: bool
    on_cpu: bool


@dataclass(frozen=True, slots=True)
class _NoStepLoss:
    """A loss that reports zero remaining tokens, so that the engine takes no optimizer step."""

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
    """Run forward and backward passes of the largest micro-batches without an optimizer step. Collective.

    All tokens have the same id. Afterwards weights, moments, gradients, version and random generators are bit
    for bit the same as before.

    Args:
        worker: The worker.
        role: The role of the engine.
        outputs: The model outputs that the engine's loss reads.
        batching: The config of the batching of the engine's updates.
        worst: The largest micro-batches.

    Raises:
        DeviceMemoryError: The GPU does not have enough memory.
    """
    if worker.device.type == "cpu" and not worst.on_cpu:
        return
    sequences = worst.rows * (2 if worst.several else 1)
    tokens = Ragged.from_list([[0] * worst.length] * sequences, dtype=torch.int64)
    mask = torch.ones(len(tokens.values), dtype=torch.bool)
    batch = DataProto({"tokens": tokens, "response_mask": tokens.with_values(mask)})
    devices = [worker.device] if worker.device.type == "cuda" else []
    loss = _NoStepLoss(outputs - {"ref_kl"})  # ref_kl needs the reference's hidden states
    with (
        worker.timeline.phase("worst_batch"),
        torch.random.fork_rng(devices=devices),
        worker.on_device(worker.trained(), training=True),
    ):
        found = worker.trained().train_step(batch, loss, micro=micro_batching(batching)).to_floats()
    times = "2 × " if worst.several else ""
    worker.say(f"{role}: the largest batch ran before the first step: {times}{found['tokens']:,.0f} tokens")
