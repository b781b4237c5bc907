"""Process group, device mesh and sharding."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tandem.errors import ConfigError
from tandem.models.collectives import CollectiveMeter

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_distributed(device: torch.device, *, timeout_s: float | None = None) -> DeviceMesh:
    """The data-parallel mesh over all ranks. Starts the process group if there is none: torchrun's
    when its environment is set, else a group of this one process, without a network port.

    Host tensors always travel over gloo, so that counting needs no wait for a GPU.

    Args:
        timeout_s: seconds that one collective of a group started here may take; None: PyTorch's own.
    """
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        if all(name in os.environ for name in _TORCHRUN):
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
        atexit.register(leave_distributed)
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))


def leave_distributed(*, together: bool = False) -> None:
    """Ends the process group, if there is one; at the process's exit at the latest.

    Args:
        together: once all ranks got here. A rank that tears its connections down while another still
            uses them may be ended by an abort; scripts of several ranks finish with this.
    """
    if dist.is_initialized():
        if together:
            dist.barrier()
        dist.destroy_process_group()


def shard(
    model: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    master_dtype: torch.dtype,
    reshard_after_forward: bool,
    forward_prefetch: bool,
    meter: CollectiveMeter,
) -> list[FSDPModule]:
    """Applies FSDP2 in place: each layer a unit of its own, all else the root's. Parameters stay in
    `master_dtype`; compute sees them in `compute_dtype`; gradients are summed, not averaged, over
    ranks in `master_dtype`.

    Args:
        meter: counts the units' collectives.

    Returns:
        The units, root last.

    Raises:
        ConfigError: parameters of another type than `master_dtype`.
    """
    wrong = next((name for name, p in model.named_parameters() if p.dtype != master_dtype), None)
    if wrong is not None:
        raise ConfigError("a parameter is not in the master type", field=wrong, expected=master_dtype)
    mixed = compute_dtype != master_dtype
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype if mixed else None,
        reduce_dtype=master_dtype if mixed else None,
        cast_forward_inputs=False,
    )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    units: list[FSDPModule] = [unit for unit in (*layers, model) if isinstance(unit, FSDPModule)]
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        # Gloo has no scaling sum, not even for a factor of one.
        unit.set_force_sum_reduction_for_comms(True)
        meter.attach(unit)
    if forward_prefetch:
        for unit, following in pairwise(units[:-1]):
            unit.set_modules_to_forward_prefetch([following])
    return units
