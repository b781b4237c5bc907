"""Process group, device mesh and sharding."""

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
        rank, size: the number of the share, from 0, and of all shares. Ranks that share sequences have the
            same one.
        leads: whether its outputs are taken; of those with the same share one does.
    """

    rank: int
    size: int
    leads: bool


@dataclass(frozen=True)
class Grid:
    """The division of a model over ranks. Neighbours by rank share the tokens of a micro-batch; ranks that do
    not share them take different rows. Weights are sharded over all ranks, or over groups of neighbours that
    hold one copy each (hybrid sharding). Nearest neighbours may split each layer (tensor parallelism): they
    take the same tokens, and what is sharded is each one's part of the layer. All of this may be there once
    for each stage of a pipeline, the first stage on the first ranks: those at the same place of every stage
    take the same rows.

    Attributes:
        weights: ("pp", "replicate", "shard", "tp"): the stages, of each the copies of its weights, the shards
            of a copy, and the parts of each layer.
        work: ("pp", "data", "sequence", "tp"): the stages, of each the ranks with different rows, those that
            share each row, and those that split the layers.
    """

    weights: DeviceMesh
    work: DeviceMesh

    @classmethod
    def over_all_ranks(
        cls, device: torch.device, *, fsdp_size: int = -1, sequence: int = 1, tensor: int = 1, stages: int = 1
    ) -> Grid:
        """
        Args:
            fsdp_size: ranks over which each part of a layer is sharded; -1: all.
            sequence: ranks that share the tokens of each micro-batch.
            tensor: ranks that split each layer.
            stages: of the pipeline.

        Raises:
            ConfigError: a size that does not divide the number of ranks.
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
        """This rank's share of a batch's rows."""
        data, sequence, tensor, stage = (self.work[name] for name in ("data", "sequence", "tp", "pp"))
        leads = sequence.get_local_rank() == 0 and tensor.get_local_rank() == 0
        leads = leads and stage.get_local_rank() == stage.size() - 1
        return Share(data.get_local_rank(), data.size(), leads)

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh of `fully_shard`: one dimension unless there are copies."""
        copies = self.weights["replicate"].size() > 1
        return self.weights["replicate", "shard"] if copies else self.weights["shard"]


def _check_divides(field: str, size: int, ranks: int) -> None:
    if ranks % size:
        raise ConfigError(
            "the ranks of the model cannot be divided so",
            field=field,
            got=f"{size} of {ranks} ranks",
            expected=f"a divisor of {ranks}",
        )


def require_plain(kind: str, field: str, size: int, problem: str) -> None:
    """
    Args:
        kind: a config's model_type.
        field: the key that divides the model, among `size` ranks.

    Raises:
        ModelError: an architecture that is not known to be embedding, layers and norm.
    """
    if kind not in PLAIN_DECODERS:
        raise ModelError(
            problem,
            field=field,
            got=f"{size}, model_type {kind}",
            expected=f"1, or a model of type {', '.join(PLAIN_DECODERS)}",
            remedy=f"leave {field.rpartition('.')[2]} at 1: FSDP shards any model",
        )


def init_distributed(device: torch.device, *, timeout_s: float | None = None) -> None:
    """Starts the process group if there is none: torchrun's when its environment is set, else a group of
    this one process, without a network port.

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


def collective_timeout() -> timedelta:
    """The time that a collective of the process group may take. A group made of some of its ranks would
    otherwise get PyTorch's own limit."""
    world: Any = dist.distributed_c10d._get_default_group()
    limit: timedelta = world._get_backend(torch.device("cpu")).options._timeout
    return limit


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
    parts: Sequence[Sequence[nn.Module]],
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    master_dtype: torch.dtype,
    reshard_after_forward: bool,
    forward_prefetch: bool,
    meter: CollectiveMeter,
) -> list[FSDPModule]:
    """Applies FSDP2 in place. Parameters stay in `master_dtype`; compute sees them in `compute_dtype`;
    gradients are summed, not averaged, over ranks in `master_dtype`.

    Args:
        parts: modules that share a unit, as `tandem.models.wrap.wrapped` gives them; all else is the root's.
        meter: counts the units' collectives.

    Returns:
        The units, each by the first of its modules, root last.

    Raises:
        ConfigError: trained parameters of another type than `master_dtype`.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    wrong = next((name for name, p in trained if p.dtype != master_dtype), None)
    if wrong is not None:
        raise ConfigError("a parameter is not in the master type", field=wrong, expected=master_dtype)
    mixed = compute_dtype != master_dtype
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype if mixed else None,
        reduce_dtype=master_dtype if mixed else None,
        cast_forward_inputs=False,
    )
    for part in reversed(parts):
        fully_shard(list(part), mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, shard_placement_fn=_across)
    units: list[FSDPModule] = [
        unit for unit in (*(part[0] for part in parts), model) if isinstance(unit, FSDPModule)
    ]
    for unit in units:
        if mesh.size() > 1:  # for one rank FSDP would copy the gradient, to divide it by one
            unit.set_gradient_divide_factor(1.0)
        # Gloo has no scaling sum, not even for a factor of one.
        unit.set_force_sum_reduction_for_comms(True)
        meter.attach(unit)
    if forward_prefetch:
        for unit, following in pairwise(units[:-1]):
            unit.set_modules_to_forward_prefetch([following])
    # Each unit's backward gathers the layer before it, and nothing else; the first one's the root. FSDP's own
    # guess goes by the forwards since the last backward, and a rollout runs different numbers of them on
    # different ranks, which would then wait for each other in different gathers.
    for earlier, unit in pairwise(units):
        unit.set_modules_to_backward_prefetch([earlier])
    if len(units) > 1:
        units[0].set_modules_to_backward_prefetch([units[-1]])
    return units


def _across(parameter: nn.Parameter) -> Shard | None:
    """The dimension that FSDP cuts: rows, or columns if rows are split unevenly already, as no placement of
    PyTorch's describes such rows cut once more."""
    if not isinstance(parameter, DTensor):
        return None
    uneven = parameter.placements[0].is_shard(0) and parameter.shape[0] % parameter.device_mesh.size()
    return Shard(1) if uneven else None
