"""The executor that runs the micro-batches of a step one after the other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tandem.engines.train.base import Counts, LossFn
from tandem.engines.train.microbatch import MicroBatch
from tandem.engines.train.routers import Routers
from tandem.models.activation_offload import ActivationOffload
from tandem.models.policy import PackedModel
from tandem.observability.metrics import Metrics
from tandem.protocol import DataProto, Ragged

Run = tuple[MicroBatch, Mapping[str, Tensor]]
"""A micro-batch and the model's outputs for it."""


def synchronize(root: FSDPModule, *, last: bool, each: bool) -> None:
    """Set whether FSDP's next backward pass reduces gradients and frees the gathered weights.

    Each copy of the weights is sharded over a group of ranks. Over this group, gradients are reduced in the
    last micro-batch of a mini-batch, or in every micro-batch if `each` is set. These micro-batches also free
    the gathered weights. Over several copies of the weights (hybrid sharding), gradients are always reduced
    in the last micro-batch only.

    Args:
        root: the root FSDP unit.
        last: whether this is the last micro-batch of the mini-batch.
        each: whether gradients are reduced in every micro-batch.
    """
    root.set_requires_gradient_sync(last or each)
    root.set_requires_all_reduce(last)
    root.set_reshard_after_backward(last or each)


def collected(runs: Iterable[Run], names: Collection[str], tokens: Ragged) -> DataProto:
    """Join the outputs of all micro-batches into columns on the host, in the order of the rows.

    Args:
        runs: micro-batches with their outputs; at least one, which may be a ghost (a placeholder without
            rows).
        names: names of the outputs to keep.
        tokens: the ragged column whose row lengths the results have.
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
    """An executor that runs micro-batches one after the other.

    All methods are collective over the ranks that process the same rows.

    Args:
        module: the sharded model.
        root: the root FSDP unit of the model.
        device: the device of the model.
        routers: the routers of the model's mixtures.
        each: True: gradients are reduced in every micro-batch. False: gradients are reduced only in the last
            micro-batch.
        offload: the wrapper that offloads activations to the host. None: activations stay on the device.
    """

    def __init__(
        self,
        module: PackedModel,
        root: FSDPModule,
        device: torch.device,
        *,
        routers: Routers,
        each: bool,
        offload: ActivationOffload | None = None,
    ) -> None:
        self._module, self._root, self._device, self._routers = module, root, device, routers
        self._each, self._offload = each, offload

    def outputs(self, parts: Iterable[MicroBatch], wanted: frozenset[str]) -> Iterator[Run]:
        """Yield each micro-batch together with the model's outputs, without gradients."""
        for part in parts:
            yield part, self._module(part.inputs, wanted)

    def gradients(self, parts: Sequence[MicroBatch], loss: LossFn, counts: Counts) -> tuple[Metrics, Tensor]:
        """Run forward and backward passes, and accumulate the gradients of all micro-batches.

        The last backward pass reduces the gradients over all ranks. Between micro-batches whose gradients are
        not reduced, the weights stay gathered.

        Returns:
            The metrics and the fp64 sum of the losses, both of this rank. On ranks that do not compute the
            loss, the metrics are empty and the sum is zero.
        """
        found: list[Metrics] = []
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._routers.begin(parts)
        for index, part in enumerate(parts):
            synchronize(self._root, last=index == len(parts) - 1, each=self._each)
            inputs = self._routers.observed(part)
            out = self._module(inputs, loss.outputs)
            share, metrics = loss(out, part.columns, part.offsets, counts)
            share = share + self._routers.losses(inputs, metrics)
            torch.autograd.backward(share)
            if self._offload is not None:
                self._offload.report(metrics)
            found.append(metrics)
            total += share.detach()
        return Metrics.merged(found), total

    def broadcast(self, metrics: Metrics, total: Tensor) -> tuple[Metrics, Tensor]:
        """Return the metrics and the loss on every rank of the pipeline.

        This class returns its arguments unchanged, because every rank computes the loss. In a subclass where
        only some ranks compute the loss, these ranks send both to the other ranks.
        """
        return metrics, total
