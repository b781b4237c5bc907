"""The process group, the device mesh and FSDP sharding."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from tandem.config.model import PLAIN_DECODERS
from tandem.errors import ConfigError, ModelError
from tandem.models.collectives import CollectiveMeter

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of a batch that a rank takes.

    Attributes:
        rank: the number of the share, from 0. Ranks that share sequences have the same number.
        size: the number of shares.
        leads: whether the rank's outputs are used. Of the ranks with the same share, one leads.
    """

    rank: int
    size: int
    leads: bool


@dataclass(frozen=True)
class Grid:
    """The division of a model over ranks.

    Neighbouring ranks share the tokens of a micro-batch. Ranks that do not share tokens take different rows.
    Weights are sharded over all ranks, or over groups of neighbours that hold one copy each (hybrid
    sharding). The nearest neighbours may split each layer (tensor parallelism): they take the same tokens,
    and FSDP shards each rank's part of the layer. With pipeline parallelism, all of this exists once per
    stage, with the first stage on the first ranks. Ranks at the same place of every stage take the same rows.

    Attributes:
        weights: mesh ("pp", "replicate", "shard", "tp"): the stages, the copies of a stage's weights, the
            shards of a copy, and the parts of each layer.
        work: mesh ("pp", "data", "sequence", "tp"): the stages, the ranks of a stage with different rows, the
            ranks that share each row, and the ranks that split the layers.
    """

    weights: DeviceMesh
    work: DeviceMesh

    @classmethod
    def over_all_ranks(
        cls, device: torch.device, *, fsdp_size: int = -1, sequence: int = 1, tensor: int = 1, stages: int = 1
    ) -> Grid:
        """Create the grid over all ranks.

        Args:
            device: the kind of device.
            fsdp_size: number of ranks over which each part of a layer is sharded; -1: all.
            sequence: number of ranks that share the tokens of each micro-batch.
            tensor: number of ranks that split each layer.
            stages: number of pipeline stages.

        Raises:
            ConfigError: If a size does not divide the number of ranks.
        """
        world = dist.get_world_size()
        _check_divides("fsdp_config.pipeline_parallel_size", stages, world)
        world //= stages
        _check_divides("fsdp_config.tensor_parallel_size", tensor, world)
        parts = world // tensor
        shards = parts if fsdp_size == -1 else fsdp_size
        _check_divides("fsdp_config.fsdp_size", shards, parts)
        _check_divides("ulysses_sequence_parallel_size", sequence, parts)
        kind = device.type
        weights, work = (
            (stages, parts // shards, shards, tensor),
            (stages, parts // sequence, sequence, tensor),
        )
        return cls(
            init_device_mesh(kind, weights, mesh_dim_names=("pp", "replicate", "shard", "tp")),
            init_device_mesh(kind, work, mesh_dim_names=("pp", "data", "sequence", "tp")),
        )

    @property
    def share(self) -> Share:
        """This rank's share of the rows of a batch."""
        data, sequence, tensor, stage = (self.work[name] for name in ("data", "sequence", "tp", "pp"))
        leads = sequence.get_local_rank() == 0 and tensor.get_local_rank() == 0
        leads = leads and stage.get_local_rank() == stage.size() - 1
        return Share(data.get_local_rank(), data.size(), leads)

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh for `fully_shard`. It has one dimension unless there are copies of the weights."""
        copies = self.weights["replicate"].size() > 1
        return self.weights["replicate", "shard"] if copies else self.weights["shard"]


def _check_divides(field: str, size: int, ranks: int) -> None:
    if ranks % size:
        raise ConfigError(
            "the model's ranks cannot be divided evenly",
            field=field,
            got=f"{size} of {ranks} ranks",
            expected=f"a divisor of {ranks}",
        )


def require_plain(kind: str, field: str, size: int, problem: str) -> None:
    """Check that an architecture consists of an embedding, layers and a norm.

    Args:
        kind: a config's model_type.
        field: the config key that divides the model among `size` ranks.
        size: the value of that key.
        problem: the message of the error.

    Raises:
        ModelError: If the architecture is not known to be of this form.
    """
    if kind not in PLAIN_DECODERS:
        raise ModelError(
            problem,
            field=field,
            got=f"{size}, model_type {kind}",
            expected=f"1, or a model of type {', '.join(PLAIN_DECODERS)}",
            remedy=f"set {field.rpartition('.')[2]} to 1; FSDP shards any model",
        )


def init_distributed(device: torch.device, *, timeout_s: float | None = None) -> None:
    """Start the process group unless one exists.

    With torchrun's environment variables it is torchrun's group, else a group with only this process, without
    a network port. Host tensors always use gloo, so that counting does not wait for a GPU.

    Args:
        device: the device of the model.
        timeout_s: timeout of one collective, in seconds, for a group that is started here; None: PyTorch's
            default.
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


def collective_timeout() -> timedelta:
    """Return the timeout of a collective of the process group.

    Groups of some of the ranks need it, because they would otherwise get PyTorch's default.
    """
    world: Any = dist.distributed_c10d._get_default_group()
    limit: timedelta = world._get_backend(torch.device("cpu")).options._timeout
    return limit


def leave_distributed(*, together: bool = False) -> None:
    """End the process group if there is one. The process's exit calls this too.

    Args:
        together: first wait until all ranks get here. A rank that closes its connections while another rank
            still uses them may be aborted, so scripts of several ranks set this at their end.
    """
    if dist.is_initialized():
        if together:
            dist.barrier()
        dist.destroy_process_group()


def shard(
    model: nn.Module,
    parts: Sequence[Sequence[nn.Module]],
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    master_dtype: torch.dtype,
    reshard_after_forward: bool,
    forward_prefetch: bool,
    meter: CollectiveMeter,
) -> list[FSDPModule]:
    """Apply FSDP2 in place.

    Parameters stay in `master_dtype`. Computation sees them in `compute_dtype`. Gradients are summed over
    ranks, not averaged, in `master_dtype`. `parts` are the modules that share a unit, as
    `tandem.models.wrap.wrapped` returns them; the root unit has all others. `meter` measures the units'
    collectives.

    Returns:
        The units, each by its first module, with the root last.

    Raises:
        ConfigError: If a trained parameter has another type than `master_dtype`.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    wrong = next((name for name, p in trained if p.dtype != master_dtype), None)
    if wrong is not None:
        raise ConfigError("a parameter does not have the master type", field=wrong, expected=master_dtype)
    mixed = compute_dtype != master_dtype
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype if mixed else None,
        reduce_dtype=master_dtype if mixed else None,
        cast_forward_inputs=False,
    )
    for part in reversed(parts):
        fully_shard(list(part), mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, shard_placement_fn=_shard_dimension)
    units: list[FSDPModule] = [
        unit for unit in (*(part[0] for part in parts), model) if isinstance(unit, FSDPModule)
    ]
    for unit in units:
        if mesh.size() > 1:  # with one rank FSDP would copy the gradient to divide it by 1
            unit.set_gradient_divide_factor(1.0)
        # Gloo has no sum with a scale factor, not even for a factor of one.
        unit.set_force_sum_reduction_for_comms(True)
        meter.attach(unit)
    if forward_prefetch:
        for unit, following in pairwise(units[:-1]):
            unit.set_modules_to_forward_prefetch([following])
    # The backward pass of each unit prefetches only the layer before it; that of the first unit prefetches
    # the root. FSDP's own choice depends on the forward passes since the last backward pass. A rollout runs
    # different numbers of them on different ranks, and the ranks would then wait for each other in different
    # gathers.
    for earlier, unit in pairwise(units):
        unit.set_modules_to_backward_prefetch([earlier])
    if len(units) > 1:
        units[0].set_modules_to_backward_prefetch([units[-1]])
    return units


def _shard_dimension(parameter: nn.Parameter) -> Shard | None:
    """Return the dimension that FSDP cuts: rows, or columns if tensor parallelism split rows unevenly.

    PyTorch has no placement for uneven rows that are cut once more.
    """
    if not isinstance(parameter, DTensor):
        return None
    uneven = parameter.placements[0].is_shard(0) and parameter.shape[0] % parameter.device_mesh.size()
    return Shard(1) if uneven else None
