"""The state that a training step changes: sharded parameters and the optimizer's state.

This module updates the state, moves it between devices and saves it.
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
from tandem.models.lora import is_adapter
from tandem.models.parallel import Grid
from tandem.models.policy import PackedModel
from tandem.models.tensor_group import joined, local, take


class TrainState:
    """The parameters of a sharded module and the optimizers that update them.

    Args:
        module: the module, sharded by FSDP2, with every parameter in its final place.
        optim: the optimizer's config section. None: the module is frozen.
        meter: counts the optimizer's collectives.
        grid: the ranks that hold parts of one copy of the model.
        stages: the weights of the other pipeline stages. None: the module is not a pipeline stage.

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
        self._meter, self._stages = meter, stages
        self._writers: dist.ProcessGroup | None = None
        self._host_optimizer = optim is not None and optim.optimizer == "adamw_cpu"
        self._optim = optim
        device = local(next(module.parameters())).device
        self._parameters_host, self._optimizer_host = HostStore(device), HostStore(device)
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Build the optimizers again, in the state before the first step. A frozen module gets none."""
        layers: Any = self.module.decoder.layers
        optim, meter = self._optim, self._meter
        self.optimizers = [] if optim is None else build_optimizers(self.module, layers, optim, meter)
        self._optimizer_host.holds = False
        self._slots = {p: slots for each in self.optimizers for p, slots in each.state.items()}

    def gradient_norm(self) -> Tensor:
        """Return the Euclidean norm of the whole gradient over all ranks, a float64 scalar on the device."""
        if self._stages is not None:
            return self._stages.gradient_norm()
        return gradient_norm(self.module.parameters())

    def step(self, lr: float, grad_norm: Tensor, clip_grad: float) -> None:
        """Take one optimizer step. If the gradient's norm exceeds `clip_grad`, scale it to that norm.

        Args:
            lr: the learning rate.
            grad_norm: norm of the gradient before clipping.
            clip_grad: the largest norm allowed.
        """
        assert self.optimizers
        clip(self.module.parameters(), grad_norm, clip_grad)
        for optimizer in self.optimizers:
            set_learning_rate(optimizer, lr)
            optimizer.step()

    def offload(self, *, parameters: bool, optimizer: bool) -> None:
        """Move parameters and optimizer state to the host, if requested and not there yet."""
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
        module._apply(lambda tensor: moved.pop(tensor, tensor))  # a tied parameter comes twice

    def _take_moments(self, move: Callable[[list[Tensor]], list[Tensor]]) -> None:
        places = [
            (slots, name)
            for slots in self._slots.values()
            for name, value in slots.items()
            if value.ndim  # scalar step counters stay where the update reads them
        ]
        moved = move([slots[name] for slots, name in places])
        for (slots, name), value in zip(places, moved, strict=True):
            slots[name] = value

    def take_transfers(self) -> dict[str, tuple[float, int]]:
        """Return seconds and bytes of the state copies since the last call; see `TrainEngine`."""
        first, second = self._parameters_host.take(), self._optimizer_host.take()
        return {way: (first[way][0] + second[way][0], first[way][1] + second[way][1]) for way in first}

    def bytes_by_device(self) -> dict[str, int]:
        """Return the bytes of this rank's shards, by "parameters@DEVICE" and "optimizer@DEVICE"."""
        total: Counter[str] = Counter()
        moments = [value for slots in self._slots.values() for value in slots.values()]
        for kind, tensors in (("parameters", self.module.parameters()), ("optimizer", moments)):
            for tensor in tensors:
                shard = local(tensor.detach())
                total[f"{kind}@{shard.device}"] += sum(part.nbytes for part in leaves(shard))
        return dict(total)

    def copy_in(self, stream: Iterable[tuple[str, Tensor]], *, whole: bool) -> None:
        """Load whole tensors by Hugging Face name. Each rank keeps its shards; the optimizer state stays.

        Args:
            stream: names and tensors.
            whole: whether the stream must hold every weight of the model.

        Raises:
            EngineError: a weight is missing, unknown, given twice or of another shape, or the model has
                adapters.
        """
        self.adapters.check_whole()
        mine, left = self._base_weights(), self.shapes()
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
        """Return the `checksum` of this rank's shards in `dtype`, by Hugging Face name.

        The checksums of the ranks that hold one copy add up to the checksum of the whole weight. Collective
        if the model has adapters.
        """
        mine = self._base_weights().items()
        sums = {name: shards.part_checksum(self.adapters.merged(value), dtype) for name, value in mine}
        return sums if self._stages is None else self._stages.completed(sums)

    def weights(self, dtype: torch.dtype, names: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights by name; see `TrainEngine.weights`."""
        mine, stages = self._base_weights(), self._stages
        device = local(next(iter(mine.values()))).device
        for name in self.shapes():
            if names is None or name in names:
                value = None
                if stages is None or stages.has(name):
                    value = shards.gathered(self.adapters.merged(mine[name]), dtype, self._meter)
                if stages is not None:
                    value = stages.sent(name, value, dtype, device)
                assert value is not None
                yield name, value

    def output_head(self, dtype: torch.dtype) -> Tensor:
        """Return the whole output embedding; see `TrainEngine.output_head`."""
        names = [name for name, p in self.named().items() if p is self.module.output_layer.weight]
        (head,) = (value.clone() for _, value in self.weights(dtype, names))
        return head

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of all weights of the whole model by Hugging Face name, without adapters.

        They include the weights that this rank does not hold.
        """
        if self._stages is not None:
            return dict(self._stages.shapes)
        return {name: parameter.shape for name, parameter in self._base_weights().items()}

    def counts(self) -> dict[str, int]:
        """Return `parameters` (of the whole model, with adapters) and `trainable_parameters`."""
        mine = self.named().items()
        whole = sum(shape.numel() for shape in self.shapes().values())
        whole += sum(p.numel() for name, p in mine if is_adapter(name))
        if self.adapters:
            learns = sum(p.numel() for _, p in mine if p.requires_grad)
        else:
            learns = whole if self.optimizers else 0
        return {"parameters": whole, "trainable_parameters": learns}

    def _base_weights(self) -> dict[str, Tensor]:
        """Return the parameters in `named` that are not adapters."""
        return {name: p for name, p in self.named().items() if not is_adapter(name)}

    def named(self) -> dict[str, Tensor]:
        """Return the parameters of this rank's pipeline stage by Hugging Face name; tied ones once.

        Adapters have the names that peft gives them.
        """
        return {self.module.hf_name(name): p for name, p in self.module.named_parameters()}

    def _state_dict(self, version: int) -> dict[str, Any]:
        """Return the tensors of a checkpoint by Hugging Face name. Loading writes into these same tensors.

        For a model with adapters, these are the trained parameters only, together with checksums that
        identify the base model.
        """
        named = self.named()
        state: dict[str, Any] = self.adapters.state(named) if self.adapters else {}
        named = trained(named) if self.adapters else named
        state["model"] = {name: p.detach() for name, p in named.items()}
        if self.optimizers:
            state["optimizer"] = {name: self._slots[p] for name, p in named.items()}
        state["version"] = torch.tensor(version)
        return state

    def save(self, path: Path, version: int) -> None:
        """Save the state into the folder `path`; every rank writes its own shards. Collective.

        Raises:
            OSError, RuntimeError: the error that the first failing rank met while writing.
        """
        _write(self._state_dict(version), path, None)

    def stage(self, path: Path, version: int) -> Callable[[], None]:
        """Copy what `save` writes to the host, so that it can be written while training goes on. Collective.

        Returns:
            A function that writes the copy. Call it on every rank, on any thread. It raises what `save`
            raises.
        """
        if self._writers is None:  # the writing thread needs its own group, apart from training's collectives
            self._writers = dist.new_group(backend="gloo")
        state = tree_map(_host_copy, self._state_dict(version))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return functools.partial(_write, state, path, self._writers)

    def load(self, path: Path) -> int:
        """Load what `save` wrote, resharded if the number of ranks has changed. Collective.

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
    except CheckpointException as error:  # a BaseException, but callers clean up after an Exception
        raise next(cause for cause, _ in error.failures.values()) from error


def _host_copy(value: Tensor) -> Tensor:
    """Copy this rank's part of a tensor to the host.

    Copies from a GPU go into pinned memory, so that the copies of all tensors overlap.
    """
    shard = local(value)
    host = torch.empty_like(shard, device="cpu", pin_memory=shard.is_cuda)
    host.copy_(shard, non_blocking=True)
    return joined(host, value._spec) if isinstance(value, DTensor) else host
