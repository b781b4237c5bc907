"""The ranks that share every layer of a model among them, and what they exchange."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tandem.models.collectives import CollectiveMeter, exchanged


class TensorGroup:
    """A tensor-parallel group: its ranks run the same rows, each with its part of the weights.

    Args:
        mesh: of one dimension.
        meter: counts what is exchanged.

    Attributes:
        rank, size: this rank's place, and how many there are.
    """

    def __init__(self, mesh: DeviceMesh, meter: CollectiveMeter) -> None:
        self.mesh = mesh
        self.rank = mesh.get_local_rank()
        self.size = mesh.size()
        self._group = mesh.get_group()
        self._meter = meter

    def entries(self, vocabulary: int) -> slice:
        """This rank's entries of a vocabulary: as many on all, rounded up; on the last they may be fewer."""
        each = -(-vocabulary // self.size)
        return slice(self.rank * each, min(vocabulary, (self.rank + 1) * each))

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduces a contiguous tensor in place, without gradient; the same bits on all ranks."""
        self._meter.all_reduce(tensor, op, self._group)
        return tensor

    def copied(self, x: Tensor) -> Tensor:
        """x, the same on all ranks, on its way into what differs between them: the gradients that come back
        are summed ("f" in Shoeybi et al. 2019, arXiv 1909.08053)."""
        return exchanged(x, lambda x: x.view_as(x), self._total)

    def summed(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, the same on all; the gradient goes to each of them ("g" there)."""
        return exchanged(x, self._total, lambda gradient: gradient)

    def _total(self, x: Tensor) -> Tensor:
        return self._meter.total(x, self._group)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def joined(part: Tensor, spec: DTensorSpec) -> DTensor:
    """Return the tensor of which this rank has that part, and other ranks theirs."""
    return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def take(value: Tensor, whole: Any) -> None:
    """Overwrite this rank's part of a tensor.

    Args:
        whole: the values of the whole tensor, or a slice of a safetensors file.
    """
    part = local(value)
    if part.numel():
        part.copy_(whole[place(value)])


def place(value: Tensor) -> tuple[slice, ...]:
    """The place of this rank's part in the whole tensor."""
    if not isinstance(value, DTensor):
        return tuple(slice(0, size) for size in value.shape)
    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
