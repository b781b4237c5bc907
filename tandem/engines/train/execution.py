"""The run of a step's micro-batches, one after the other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tandem.engines.train.base import Counts, LossFn
from tandem.engines.train.microbatch import MicroBatch
from tandem.models.activation_offload import ActivationOffload
from tandem.models.policy import PackedModel
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, Ragged

Run = tuple[MicroBatch, Mapping[str, Tensor]]
"""A micro-batch, and the outputs of the model there."""


def synchronize(root: FSDPModule, *, last: bool, each: bool) -> None:
    """Says what the next backward does with gradients: in the last of a mini-batch, or in each, they are
    reduced over the ranks that share the weights, and the weights given up; over copies of the weights in the
    last alone."""
    root.set_requires_gradient_sync(last or each)
    root.set_requires_all_reduce(last)
    root.set_reshard_after_backward(last or each)


def collected(runs: Iterable[Run], names: Collection[str], tokens: Ragged) -> DataProto:
    """The outputs of all micro-batches as columns on the host, in the order of the rows.

    Args:
        runs: at least one micro-batch, which may be a ghost.
        tokens: the column they are aligned with.
    """
    out: Mapping[str, Tensor] = {}
    rows: list[int] = []
    lengths: list[Tensor] = []
    parts: dict[str, list[Tensor]] = {name: [] for name in sorted(names)}
    for part, out in runs:
        if not part.rows:
            continue
        rows += part.rows
        lengths.append(part.lengths)
        for name in parts:
            parts[name].append(out[name])
    if not rows:
        return DataProto({name: tokens.with_values(out[name][:0].cpu()) for name in parts})
    back = torch.tensor(rows).argsort()
    return DataProto(
        {
            name: Ragged.from_lengths(torch.cat(values).cpu(), torch.cat(lengths))[back]
            for name, values in parts.items()
        }
    )


class Execution:
    """Micro-batches one after the other. All methods are collective over the ranks that take the same rows.

    Args:
        module: sharded.
        root: its FSDP unit.
        each: gradients are reduced in every micro-batch, not in the last alone.
        offload: moves its activations; None: they stay.
    """

    def __init__(
        self,
        module: PackedModel,
        root: FSDPModule,
        device: torch.device,
        *,
        each: bool,
        offload: ActivationOffload | None = None,
    ) -> None:
        self._module, self._root, self._device = module, root, device
        self._each, self._offload = each, offload

    def outputs(self, parts: Iterable[MicroBatch], wanted: frozenset[str]) -> Iterator[Run]:
        """Each micro-batch and the outputs of the model there, without gradient."""
        for part in parts:
            yield part, self._module(part.inputs, wanted)

    def gradients(self, parts: Sequence[MicroBatch], loss: LossFn, counts: Counts) -> tuple[Metrics, Tensor]:
        """Leaves the gradients of these micro-batches with the parameters, over all ranks, in the last
        backward of which they meet. Weights stay gathered between micro-batches whose gradients are not
        reduced.

        Returns:
            metrics, and the fp64 sum of losses; both are this rank's, and empty and zero on those that see
            no loss.
        """
        found: list[Metrics] = []
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, part in enumerate(parts):
            synchronize(self._root, last=index == len(parts) - 1, each=self._each)
            out = self._module(part.inputs, loss.outputs)
            share, metrics = loss(out, part.columns, part.offsets, counts)
            torch.autograd.backward(share)
            if self._offload is not None:
                self._offload.report(metrics)
            found.append(metrics)
            total += share.detach()
        return Metrics.merged(found), total

    def told(self, metrics: Metrics, total: Tensor) -> tuple[Metrics, Tensor]:
        """The metrics and the total, sent by a rank that sees the loss to those that do not: here every rank
        does."""
        return metrics, total
