"""The state that a training step changes: sharded parameters and optimizer state.

This module updates the state, moves it between device and host, and saves it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from tandem.checkpoint.sharded import cause, load_shards
from tandem.config.optim import OptimConfig
from tandem.engines.train import shards
from tandem.engines.train.gradients import clip, gradient_norm
from tandem.engines.train.host_store import HostStore, leaves
from tandem.engines.train.lora import Adapters, trained
from tandem.engines.train.optimizers import build_optimizers, set_learning_rate
from tandem.engines.train.stages import Stages
from tandem.errors import CheckpointError, EngineError
from tandem.models.collectives import CollectiveMeter
from tandem.models.logits import with_bias
from tandem.models.lora import is_adapter
from tandem.models.parallel import Grid
from tandem.models.policy import PackedModel
from tandem.models.tensor_group import joined, local, take
from tandem.models.weight_files import persistent_buffers


class TrainState:
    """The parameters of a sharded module and the optimizers that update them.

    Args:
        module: the module, sharded by FSDP2. Its parameters must not be replaced later.
        optim: the optimizer's config section. None: the module is frozen.
        meter: the meter for the optimizer's collectives.
        grid: the device meshes of the engine.
        stages: the pipeline stages of the model. None: no pipeline parallelism.

    Raises:
        ConfigError: the optimizer needs a package that is not installed.
    """

    def __init__(
        self,
        module: PackedModel,
        optim: OptimConfig | None,
        meter: CollectiveMeter,
        grid: Grid,
        stages: Stages | None = None,
    ) -> None:
        self.module = module
        self.adapters = Adapters(module, meter, grid)
        self._meter, self._stages, self._grid = meter, stages, grid
        self._constants = frozenset(self._buffers()) if stages is None else stages.constants
        self._writers: dist.ProcessGroup | None = None
        self._host_optimizer = optim is not None and optim.optimizer == "adamw_cpu"
        self._optim = optim
        device = local(next(module.parameters())).device
        self._parameters_host, self._optimizer_host = HostStore(device), HostStore(device)
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Build the optimizers with their initial state. A frozen module has no optimizers."""
        layers, optim, meter = self.module.layers, self._optim, self._meter
        self.optimizers = [] if optim is None else build_optimizers(self.module, layers, optim, meter)
        self._optimizer_host.holds = False
        self._slots = {p: slots for each in self.optimizers for p, slots in each.state.items()}

    def gradient_norm(self) -> Tensor:
        """Return the Euclidean norm of the gradient over all ranks, a float64 scalar on the device."""
        if self._stages is not None:
            return self._stages.gradient_norm()
        return gradient_norm(self.module.parameters())

    def step(self, lr: float, grad_norm: Tensor, clip_grad: float) -> None:
        """Take one optimizer step with the clipped gradient.

        Args:
            lr: the learning rate.
            grad_norm: the norm of the gradient before clipping.
            clip_grad: the maximum norm. A gradient with a larger norm is scaled to this norm.
        """
        assert self.optimizers
        clip(self.module.parameters(), grad_norm, clip_grad)
        for optimizer in self.optimizers:
            set_learning_rate(optimizer, lr)
            optimizer.step()

    def offload(self, *, parameters: bool, optimizer: bool) -> None:
        """Move parameters and optimizer state to the host, if requested and not on the host yet."""
        if parameters and not self._parameters_host.holds:
            self._take_parameters(self._parameters_host.offload)
        if optimizer and not self._host_optimizer and not self._optimizer_host.holds:
            self._take_moments(self._optimizer_host.offload)

    def onload(self, *, parameters: bool, optimizer: bool) -> None:
        """Move parameters and optimizer state back to the device, if requested and on the host."""
        if parameters and self._parameters_host.holds:
            self._take_parameters(self._parameters_host.onload)
        if optimizer and self._optimizer_host.holds:
            self._take_moments(self._optimizer_host.onload)

    def _take_parameters(self, move: Callable[[list[Tensor]], list[Tensor]]) -> None:
        mine: list[Tensor] = list(self.module.parameters())
        moved = dict(zip(mine, move(mine), strict=True))
        module: Any = self.module
        module._apply(lambda tensor: moved.pop(tensor, tensor))  # a tied parameter occurs twice

    def _take_moments(self, move: Callable[[list[Tensor]], list[Tensor]]) -> None:
        places = [
            (slots, name)
            for slots in self._slots.values()
            for name, value in slots.items()
            if value.ndim  # scalar step counters stay on the device where the update reads them
        ]
        moved = move([slots[name] for slots, name in places])
        for (slots, name), value in zip(places, moved, strict=True):
            slots[name] = value

    def take_transfers(self) -> dict[str, tuple[float, int]]:
        """Return the seconds and bytes of state copies; see `TrainEngine.take_transfers`."""
        first, second = self._parameters_host.take(), self._optimizer_host.take()
        return {way: (first[way][0] + second[way][0], first[way][1] + second[way][1]) for way in first}

    def bytes_by_device(self) -> dict[str, int]:
        """Return a dict from "parameters@DEVICE" and "optimizer@DEVICE" to this rank's bytes."""
        total: Counter[str] = Counter()
        moments = [value for slots in self._slots.values() for value in slots.values()]
        for kind, tensors in (("parameters", self.module.parameters()), ("optimizer", moments)):
            for tensor in tensors:
                shard = local(tensor.detach())
                total[f"{kind}@{shard.device}"] += sum(part.nbytes for part in leaves(shard))
        return dict(total)

    def copy_in(self, stream: Iterable[tuple[str, Tensor]], *, whole: bool) -> None:
        """Load a stream of names and whole tensors. Each rank copies its shards.

        The optimizer state does not change.

        Args:
            stream: pairs of Hugging Face name and whole tensor.
            whole: whether the stream must contain every weight of the model.

        Raises:
            EngineError: a weight is missing, unknown, given twice or of another shape, or the model has
                adapters.
        """
        self.adapters.check_whole()
        mine, left = self._base_weights() | self._buffers(), self.shapes()
        for name, value in stream:
            shape = left.pop(name, None)
            if shape is None or shape != value.shape:
                problem = "is unknown, or comes twice" if shape is None else "has the wrong shape"
                raise EngineError(
                    f"the weight {name} {problem}",
                    field=name,
                    got=tuple(value.shape),
                    expected=None if shape is None else tuple(shape),
                    remedy="load weights of the same model",
                )
            if name in mine:
                take(mine[name].detach(), value)
        if whole and left:
            raise EngineError(
                f"{len(left)} weights are missing, the first is {next(iter(left))}",
                field=next(iter(left)),
                remedy="load all weights of the model",
            )

    def checksums(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return a dict from Hugging Face name to this rank's summand of the `checksum` in `dtype`.

        The checksums of the ranks of one copy of the model add up to the checksum of the whole weight.
        Collective if the model has adapters.
        """
        mine = self._base_weights().items()
        sums = {name: shards.part_checksum(self.adapters.merged(value), dtype) for name, value in mine}
        for name, value in self._buffers().items():
            sums[name] = shards.copy_checksum(value, dtype, self._grid)
        return sums if self._stages is None else self._stages.completed(sums)

    def weights(self, dtype: torch.dtype, names: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole tensor of each weight; see `TrainEngine.weights`."""
        mine, stages = self._base_weights() | self._buffers(), self._stages
        device = local(next(iter(mine.values()))).device
        wide = torch.promote_types(dtype, torch.float32)
        for name in self.shapes():
            if names is None or name in names:
                value, given = None, wide if name in self._constants else dtype
                if stages is None or stages.has(name):
                    value = shards.gathered(self.adapters.merged(mine[name]), given, self._meter)
                if stages is not None:
                    value = stages.sent(name, value, given, device)
                assert value is not None
                yield name, value

    def output_head(self, dtype: torch.dtype) -> Tensor:
        """Return the whole output embedding; see `TrainEngine.output_head`."""
        head = self.module.output_layer
        names = {p: name for name, p in self.named().items() if p is head.weight or p is head.bias}
        whole = {name: value.clone() for name, value in self.weights(dtype, names.values())}
        return with_bias(whole[names[head.weight]], None if head.bias is None else whole[names[head.bias]])

    def shapes(self) -> dict[str, torch.Size]:
        """Return a dict from Hugging Face name to shape, for all weights and constants, except adapters.

        It includes the weights of other pipeline stages.
        """
        if self._stages is not None:
            return dict(self._stages.shapes)
        return {name: value.shape for name, value in (self._base_weights() | self._buffers()).items()}

    def counts(self) -> dict[str, int]:
        """Return the counts `parameters` (of the whole model, with adapters) and `trainable_parameters`."""
        mine = self.named().items()
        whole = sum(shape.numel() for name, shape in self.shapes().items() if name not in self._constants)
        whole += sum(p.numel() for name, p in mine if is_adapter(name))
        if self.adapters:
            learns = sum(p.numel() for _, p in mine if p.requires_grad)
        else:
            learns = whole if self.optimizers else 0
        return {"parameters": whole, "trainable_parameters": learns}

    def _base_weights(self) -> dict[str, Tensor]:
        """Return the parameters in `named` except the adapters."""
        return {name: p for name, p in self.named().items() if not is_adapter(name)}

    def _buffers(self) -> dict[str, Tensor]:
        """Return a dict from Hugging Face name to persistent buffer, for this rank's pipeline stage."""
        return {self.module.hf_name(name): value for name, value in persistent_buffers(self.module).items()}

    def named(self) -> dict[str, Tensor]:
        """Return a dict from Hugging Face name to parameter, for this rank's pipeline stage.

        Tied parameters occur once. Adapters have peft's names.
        """
        return {self.module.hf_name(name): p for name, p in self.module.named_parameters()}

    def _state_dict(self, version: int) -> dict[str, Any]:
        """Return the contents of a checkpoint. Loading a checkpoint overwrites the tensors in the result.

        The tensors have Hugging Face names. For a model with adapters, the checkpoint contains only the
        trained parameters, and checksums that identify the base model.
        """
        named, constants = self.named(), self._buffers()
        state: dict[str, Any] = self.adapters.state(named, constants) if self.adapters else {}
        named = trained(named) if self.adapters else named
        state["model"] = {name: p.detach() for name, p in named.items()}
        if not self.adapters:
            state["model"] |= constants
        if self.optimizers:
            state["optimizer"] = {name: self._slots[p] for name, p in named.items()}
        state["version"] = torch.tensor(version)
        return state

    def save(self, path: Path, version: int) -> None:
        """Save the state into the folder `path`. Every rank writes its shards. Collective.

        Raises:
            OSError, RuntimeError: the error of the first rank that failed to write.
        """
        _write(self._state_dict(version), path, None)

    def stage(self, path: Path, version: int) -> Callable[[], None]:
        """Copy the state to the host, so that it can be written while training continues. Collective.

        Returns:
            A function that writes the copy, with the same result and errors as `save`. Call this function on
            every rank, on any thread.
        """
        if self._writers is None:  # separate from training's collectives
            self._writers = dist.new_group(backend="gloo")
        state = tree_map(_host_copy, self._state_dict(version))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return functools.partial(_write, state, path, self._writers)

    def load(self, path: Path) -> int:
        """Load a checkpoint that `save` wrote, also with another number of ranks. Collective.

        Returns:
            The version of the saved weights.

        Raises:
            CheckpointError: the checkpoint cannot be read, or it belongs to another model, adapters or
                optimizer.
        """
        state = self._state_dict(0)
        try:
            if self.adapters:
                self.adapters.check_saved(path, state)
            load_shards(state, path)
        except CheckpointError:
            raise
        except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                "the training state cannot be loaded",
                got=f"{path}: {cause(error)}",
                remedy="resume from an earlier checkpoint, with the same model as in the run that saved it",
            ) from error
        return int(state["version"])


def _write(state: dict[str, Any], path: Path, group: dist.ProcessGroup | None) -> None:
    try:
        save_shards(state, checkpoint_id=path, process_group=group)
    except CheckpointException as error:  # a BaseException, but callers expect an Exception
        raise next(cause for cause, _ in error.failures.values()) from error


def _host_copy(value: Tensor) -> Tensor:
    """Copy this rank's shard of a tensor to the host.

    Copies from a GPU use pinned memory, so that the copies of all tensors overlap.
    """
    shard = local(value)
    host = torch.empty_like(shard, device="cpu", pin_memory=shard.is_cuda)
    host.copy_(shard, non_blocking=True)
    return joined(host, value._spec) if isinstance(value, DTensor) else host
