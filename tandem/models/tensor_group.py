"""The tensor-parallel group of ranks that split every layer of a model, and its collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tandem.models.collectives import CollectiveMeter, exchanged


class TensorGroup:
    """A tensor-parallel group. Its ranks process the same rows, each with a shard of every layer.

    Args:
        mesh: the mesh of the ranks, with one dimension.
        meter: the meter for exchanged bytes.

    Attributes:
        rank: the number of this rank in the group.
        size: the number of ranks.
    """

    def __init__(self, mesh: DeviceMesh, meter: CollectiveMeter) -> None:
        self.mesh = mesh
        self.rank = mesh.get_local_rank()
        self.size = mesh.size()
        self._group = mesh.get_group()
        self._meter = meter

    def entries(self, vocabulary: int) -> slice:
        """Return the slice of a vocabulary with this rank's entries.

        All ranks have the same number of entries, rounded up. The last rank may have fewer entries.
        """
        each = -(-vocabulary // self.size)
        return slice(self.rank * each, min(vocabulary, (self.rank + 1) * each))

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a contiguous tensor in place, without gradient. All ranks get the same bits."""
        self._meter.all_reduce(tensor, op, self._group)
        return tensor

    def copied(self, x: Tensor) -> Tensor:
        """Return x, the same on all ranks, as an input of modules that are split over the ranks.

        In the backward pass, the gradients of all ranks are summed ("f" in Shoeybi et al. 2019, arXiv
        1909.08053).
        """
        return exchanged(x, lambda x: x.view_as(x), self._total)

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks.

        In the backward pass, each rank gets the whole gradient ("g" in Shoeybi et al. 2019, arXiv
        1909.08053).
        """
        return exchanged(x, self._total, lambda gradient: gradient)

    def joined(self, x: Tensor) -> Tensor:
        """Return the last dimensions of all ranks' x, one after the other.

        What follows is the same on all ranks. So in the backward pass, each rank gets its own part of the
        gradient.
        """
        before = self.rank * x.shape[-1]
        return self.summed(F.pad(x, (before, (self.size - 1) * x.shape[-1] - before)))

    def _total(self, x: Tensor) -> Tensor:
        return self._meter.total(x, self._group)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's local tensor, which shares the memory of the given tensor or DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def seen_as(module: nn.Module, seen: Callable[[Any], Tensor]) -> Iterator[None]:
    """Inside the context, `seen(parameter)` stands in place of each direct parameter of a module.

    This includes convolutions in the module, because their parent may use their weights without calling them.
    """
    parts = [module, *(part for part in module.children() if isinstance(part, nn.Conv1d))]
    held = [part._parameters for part in parts]
    for part in parts:
        seen_there: Any = {name: None if p is None else seen(p) for name, p in part._parameters.items()}
        part._parameters = seen_there
    try:
        yield
    finally:
        for part, parameters in zip(parts, held, strict=True):
            part._parameters = parameters


def joined(part: Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor whose local tensor on this rank is `part`."""
    return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def take(value: Tensor, whole: Any) -> None:
    """Overwrite this rank's shard of a tensor.

    Args:
        value: the tensor, which may be a DTensor.
        whole: the values of the whole tensor, or a slice of a safetensors file.
    """
    part = local(value)
    if part.numel():
        part.copy_(whole[place(value)])


def place(value: Tensor) -> tuple[slice, ...]:
    """Return the slices of the whole tensor that this rank's shard covers."""
    if not isinstance(value, DTensor):
        return tuple(slice(0, size) for size in value.shape)
    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
