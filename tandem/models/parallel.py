"""Functions that start the process group, create the device meshes and shard a model with FSDP."""

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

from tandem.errors import ConfigError, ModelError
from tandem.models.collectives import CollectiveMeter
from tandem.models.expert_parallel import ExpertGroup, experts_modules

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Share:
    """The shard of a batch's rows that a rank processes.

    Attributes:
        rank: the number of the shard, from 0. Ranks that process the same rows have the same number.
        size: the number of shards.
        leads: whether the rank's outputs are used. This is true for one rank of each shard.
    """

    rank: int
    size: int
    leads: bool


@dataclass(frozen=True)
class Grid:
    """The device meshes over which a model is divided: data, sequence, tensor and pipeline parallelism.

    - Sequence parallelism: consecutive ranks share the tokens of a micro-batch. Ranks that do not share
      tokens process different rows.
    - Weights are sharded over all ranks, or over groups of consecutive ranks, each of which has one copy
      (hybrid sharding).
    - Tensor parallelism: groups of consecutive ranks, the innermost groups, split each layer. The ranks of a
      group process the same tokens, and FSDP shards each rank's part of a layer further.
    - Pipeline parallelism: there is one set of all these groups per stage. The first stage is on the first
      ranks. Ranks at the same position of each stage process the same rows.

    Attributes:
        weights: mesh ("pp", "replicate", "shard", "tp"): the stages, the copies of a stage's weights, the
            shards of a copy, and the ranks that split each layer.
        work: mesh ("pp", "data", "sequence", "tp"): the stages, the ranks of a stage with different rows, the
            ranks that share each row, and the ranks that split the layers.
        experts: mesh ("pp", "replicate", "shard", "ep", "tp"): like `weights`, with the shards divided into
            consecutive ranks that divide the experts. None: no expert parallelism.
    """

    weights: DeviceMesh
    work: DeviceMesh
    experts: DeviceMesh | None = None

    @classmethod
    def over_all_ranks(
        cls,
        device: torch.device,
        *,
        fsdp_size: int = -1,
        sequence: int = 1,
        tensor: int = 1,
        experts: int = 1,
        stages: int = 1,
    ) -> Grid:
        """Create the grid over all ranks.

        Args:
            device: the type of device.
            fsdp_size: number of ranks over which FSDP shards the weights; -1: all.
            sequence: number of ranks that share the tokens of each micro-batch.
            tensor: number of ranks that split each layer.
            experts: number of ranks that divide the experts of each mixture.
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
        _check_divides("fsdp_config.expert_parallel_size", experts, shards)

        def mesh(**sizes: int) -> DeviceMesh:
            shape = (stages, *sizes.values(), tensor)
            return init_device_mesh(device.type, shape, mesh_dim_names=("pp", *sizes, "tp"))

        copies, alike = parts // shards, shards // experts
        return cls(
            mesh(replicate=copies, shard=shards),
            mesh(data=parts // sequence, sequence=sequence),
            None if experts == 1 else mesh(replicate=copies, shard=alike, ep=experts),
        )

    @property
    def share(self) -> Share:
        """This rank's shard of the rows of a batch."""
        data, sequence, tensor, stage = (self.work[name] for name in ("data", "sequence", "tp", "pp"))
        leads = sequence.get_local_rank() == 0 and tensor.get_local_rank() == 0
        leads = leads and stage.get_local_rank() == stage.size() - 1
        return Share(data.get_local_rank(), data.size(), leads)

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh for FSDP2's `fully_shard`. With several copies of the weights it has two dimensions."""
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


def require_kind(kind: str, known: Sequence[str], field: str, size: int) -> None:
    """Check that a model's architecture can be divided.

    Args:
        kind: the model_type of a config.
        known: the model types that can be divided.
        field: the config key with the number of ranks that divide the model.
        size: the value of that key.

    Raises:
        ModelError: If the architecture is not known.
    """
    if kind not in known:
        raise ModelError(
            "a model of this architecture cannot be divided in this way",
            field=field,
            got=f"{size}, model_type {kind}",
            expected=f"1, or a model of type {', '.join(known)}",
            remedy=f"set {field.rpartition('.')[2]} to 1; FSDP shards any model",
        )


def init_distributed(device: torch.device, *, timeout_s: float | None = None) -> None:
    """Start torch.distributed's process group if there is none.

    If torchrun's environment variables are set, this is torchrun's group. Otherwise it is a group with only
    this process, without a network port. Host tensors always use gloo, so that collectives of counts do not
    wait for a GPU.

    Args:
        device: the device of the model.
        timeout_s: the timeout of one collective, in seconds, if this function starts the group; None:
            PyTorch's default.
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
    """Return the timeout of a collective in the process group of all ranks.

    Pass it to subgroups, which would otherwise get PyTorch's default.
    """
    world: Any = dist.distributed_c10d._get_default_group()
    limit: timedelta = world._get_backend(torch.device("cpu")).options._timeout
    return limit


def leave_distributed(*, together: bool = False) -> None:
    """End the process group if there is one. This function also runs when the process exits.

    Args:
        together: whether to wait first until all ranks call this function. If a rank closes its connections
            while another rank still uses them, that rank may be aborted. So scripts with several ranks should
            set this at their end.
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
    experts: ExpertGroup | None,
    compute_dtype: torch.dtype,
    master_dtype: torch.dtype,
    reshard_after_forward: bool,
    forward_prefetch: bool,
    meter: CollectiveMeter,
) -> list[FSDPModule]:
    """Shard a model with FSDP2, in place.

    Parameters are stored in `master_dtype` and cast to `compute_dtype` for computation. Gradients are summed
    over ranks, not averaged, in `master_dtype`. Each entry of `parts` lists the modules of one FSDP unit, as
    returned by `tandem.models.wrap.wrapped`. The root unit has all other modules. If `experts` divides the
    experts, the experts of each mixture are units too. `meter` measures the collectives of all units.

    Returns:
        The first module of each FSDP unit, in the order in which they run, with the root unit last.

    Raises:
        ConfigError: If a trained parameter has another dtype than `master_dtype`.
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
    mixtures = [] if experts is None else _shard_experts(model, experts, policy, reshard_after_forward)
    parts = [left for part in parts if (left := [module for module in part if module not in mixtures])]
    for part in reversed(parts):
        fully_shard(list(part), mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, shard_placement_fn=_shard_dimension)
    units = [*_in_order(parts, mixtures, experts_first=False), model]
    for unit in units:
        over = experts.fsdp if experts is not None and unit in mixtures else mesh
        if over.size() > 1:  # with one rank FSDP would copy the gradient to divide it by 1
            unit.set_gradient_divide_factor(1.0)
        # Gloo has no sum with a scale factor, not even for a factor of one.
        unit.set_force_sum_reduction_for_comms(True)
        meter.attach(unit)
    if forward_prefetch:
        for unit, following in pairwise(units[:-1]):
            unit.set_modules_to_forward_prefetch([following])
    _prefetch_backward([*_in_order(parts, mixtures, experts_first=True), model])
    return units


def _shard_experts(
    model: nn.Module, experts: ExpertGroup, policy: MixedPrecisionPolicy, reshard_after_forward: bool
) -> list[Any]:
    """Shard the experts of each mixture over the ranks with the same experts, and return their modules."""
    mixtures = experts_modules(model)
    for module in mixtures:
        fully_shard(
            module,
            mesh=experts.fsdp,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward and experts.shards > 1,
            shard_placement_fn=experts.shard_dimension,
        )
    return mixtures


def _in_order(parts: Sequence[Sequence[nn.Module]], mixtures: list[Any], *, experts_first: bool) -> list[Any]:
    """Return the units in the order in which they run, or with the experts before the layer around them."""
    found: list[Any] = []
    for part in parts:
        held = {inner for module in part for inner in module.modules()}
        inside = [module for module in mixtures if module in held]
        found += [*inside, part[0]] if experts_first else [part[0], *inside]
    return list(dict.fromkeys([*found, *mixtures]))


def _prefetch_backward(units: list[Any]) -> None:
    """Make each unit prefetch the unit before it in the backward pass, and the first unit prefetch the root.

    FSDP's default depends on the forward passes since the last backward pass. A rollout runs different
    numbers of forward passes on different ranks. The ranks would then wait for each other in different
    gathers.
    """
    for earlier, unit in pairwise(units):
        unit.set_modules_to_backward_prefetch([earlier])
    if len(units) > 1:
        units[0].set_modules_to_backward_prefetch([units[-1]])


def _shard_dimension(parameter: nn.Parameter) -> Shard | None:
    """Return the dimension that FSDP shards: rows, or columns if tensor parallelism split rows unevenly.

    PyTorch has no placement for uneven rows that are sharded a second time.
    """
    if not isinstance(parameter, DTensor):
        return None
    uneven = parameter.placements[0].is_shard(0) and parameter.shape[0] % parameter.device_mesh.size()
    return Shard(1) if uneven else None
