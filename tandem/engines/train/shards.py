"""Functions for the shard that a rank has of a parameter, after tensor parallelism and FSDP.

They compute the shard's summand of the whole weight's checksum, and gather the whole weight.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor, Placement

from tandem.engines.weight_sync import checksum
from tandem.models.collectives import CollectiveMeter
from tandem.models.parallel import Grid
from tandem.models.tensor_group import local, place


def part_checksum(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return this rank's summand of the whole weight's `checksum` in `dtype`.

    The summands of the ranks of one copy of the model add up to the checksum of the whole weight. If tensor
    parallelism keeps a weight whole on several ranks, only the first of these ranks returns a checksum other
    than 0.
    """
    assert isinstance(value, DTensor), "the weight is not sharded: the model is unsharded now"
    part, mesh = local(value).to(dtype), value.device_mesh
    same = (mesh.mesh_dim_names or ())[-1:] == ("tp",) and _axis(value.placements[-1]) is None
    if same and mesh.get_local_rank(mesh.ndim - 1):
        return torch.zeros((), dtype=torch.int64, device=part.device)
    lies = place(value)
    first_row = lies[0].start * math.prod(value.shape[1:-1])
    if value.dim() == 1:
        return checksum(part, first_row)
    return checksum(part, first_row, first_column=lies[-1].start, columns=value.shape[-1])


def copy_checksum(value: Tensor, dtype: torch.dtype, grid: Grid) -> Tensor:
    """Return this rank's summand of the `checksum` in `dtype` of a tensor that is whole on all ranks.

    Only the first rank of a copy of the model returns a checksum other than 0.
    """
    first = not any(grid.weights[axis].get_local_rank() for axis in ("shard", "tp"))
    return checksum(value.to(dtype)) if first else torch.zeros((), dtype=torch.int64, device=value.device)


def gathered(value: Tensor, dtype: torch.dtype, meter: CollectiveMeter) -> Tensor:
    """Gather the whole tensor in `dtype`. Collective.

    FSDP's shards are gathered directly into the result. PyTorch's `full_tensor` would need memory for two
    copies.
    """
    part = local(value).to(dtype)
    if not isinstance(value, DTensor):
        return part
    # Tensor parallelism splits before FSDP does, so FSDP's shards are joined first.
    for dimension, placement in enumerate(value.placements):
        axis = _axis(placement)
        if axis is not None and value.device_mesh.size(dimension) > 1:
            part = _joined(part, value, dimension, axis, meter)
    assert part.shape == value.shape
    return part


def _joined(part: Tensor, value: DTensor, dimension: int, axis: int, meter: CollectiveMeter) -> Tensor:
    """Concatenate the shards of the ranks along one mesh dimension. The first shard must be the longest.

    Args:
        part: this rank's shard.
        value: the sharded tensor.
        dimension: the mesh dimension.
        axis: the tensor dimension that is sharded.
        meter: the meter for the collective.
    """
    mesh, length = value.device_mesh, value.shape[axis]
    for later in range(dimension + 1, mesh.ndim):
        if _axis(value.placements[later]) == axis:
            each = -(-length // mesh.size(later))
            length = max(0, min(each, length - each * mesh.get_local_rank(later)))
    rows, most = part.transpose(0, axis).contiguous(), -(-length // mesh.size(dimension))
    received = (length - len(rows)) * math.prod(rows.shape[1:]) * rows.element_size()
    if len(rows) < most:
        rows = torch.cat([rows, rows.new_empty(most - len(rows), *rows.shape[1:])])
    whole = rows.new_empty(mesh.size(dimension) * most, *rows.shape[1:])
    with meter.measure(part.device, received):
        DefaultAllGather()(whole, rows, mesh.get_group(dimension))
    return whole[:length].transpose(0, axis).contiguous()


def _axis(placement: Placement) -> int | None:
    """Return the tensor dimension that the placement shards, or None for a replicated tensor."""
    cut: Any = placement
    return None if placement.is_replicate() else int(cut.dim)
