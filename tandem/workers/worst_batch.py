"""Run the largest possible micro-batches before the first update.

If the memory is too small, the run fails at once and not after hours.
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
    """The largest micro-batches of a rank.

    Attributes:
        rows: The number of sequences in one micro-batch.
        length: The tokens of each sequence.
        several: Whether an update has more than one micro-batch. Then two are run, because gradients add up
            between them.
        on_cpu: Whether to run it on a CPU too.
    """

    rows: int
    length: int
    several: bool
    on_cpu: bool


@dataclass(frozen=True, slots=True)
class _NoStepLoss:
    """A loss without a step: it reports that no tokens are left, so the engine takes no optimizer step."""

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

    All tokens are the same. Afterwards weights, moments, gradients, version and random generators are bit for
    bit as before.

    Args:
        worker: The worker.
        role: The role of the engine.
        outputs: The outputs of the model that its loss reads.
        batching: The batching of its updates.
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
