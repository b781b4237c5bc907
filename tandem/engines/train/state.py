"""The state that a training step changes: sharded parameters and the optimizer's state; their norm, update,
place and checkpoint."""

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
    """Parameters of a sharded module and the optimizers that update them.

    Args:
        module: sharded by FSDP2, with every parameter in its final place.
        optim: the optimizer's numbers; None for a frozen module.
        meter: counts the optimizer's collectives.
        grid: the ranks that hold parts of one copy.
        stages: the other stages' weights, where the module is a stage of a pipeline.

    Raises:
        ConfigError: an optimizer whose library is not installed.
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
        self._stays = optim is not None and optim.optimizer == "adamw_cpu"
        self._optim = optim
        device = local(next(module.parameters())).device
        self._parameters_host, self._optimizer_host = HostStore(device), HostStore(device)
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Optimizers as before the first step, where the module is trained."""
        layers: Any = self.module.decoder.layers
        optim, meter = self._optim, self._meter
        self.optimizers = [] if optim is None else build_optimizers(self.module, layers, optim, meter)
        self._optimizer_host.holds = False
        self._slots = {p: slots for each in self.optimizers for p, slots in each.state.items()}

    def gradient_norm(self) -> Tensor:
        """Euclidean norm of the whole gradient over all ranks; a float64 scalar on the device."""
        if self._stages is not None:
            return self._stages.gradient_norm()
        return gradient_norm(self.module.parameters())

    def step(self, lr: float, grad_norm: Tensor, clip_grad: float) -> None:
        """One optimizer step with the gradient scaled to norm `clip_grad` if it is longer."""
        assert self.optimizers
        clip(self.module.parameters(), grad_norm, clip_grad)
        for optimizer in self.optimizers:
            set_learning_rate(optimizer, lr)
            optimizer.step()

    def offload(self, *, parameters: bool, optimizer: bool) -> None:
        """Moves what is asked for to the host, if it is on the device."""
        if parameters and not self._parameters_host.holds:
            self._take_parameters(self._parameters_host.offload)
        if optimizer and not self._stays and not self._optimizer_host.holds:
            self._take_moments(self._optimizer_host.offload)

    def onload(self, *, parameters: bool, optimizer: bool) -> None:
        """Brings back what is asked for, if it is on the host."""
        if parameters and self._parameters_host.holds:
            self._take_parameters(self._parameters_host.onload)
        if optimizer and self._optimizer_host.holds:
            self._take_moments(self._optimizer_host.onload)

    def _take_parameters(self, move: Callable[[list[Tensor]], list[Tensor]]) -> None:
        mine: list[Tensor] = list(self.module.parameters())
        moved = dict(zip(mine, move(mine), strict=True))
        module: Any = self.module
        module._apply(lambda tensor: moved.pop(tensor, tensor))  # a tied one comes twice

    def _take_moments(self, move: Callable[[list[Tensor]], list[Tensor]]) -> None:
        places = [
            (slots, name)
            for slots in self._slots.values()
            for name, value in slots.items()
            if value.ndim  # counters stay where their update reads them
        ]
        moved = move([slots[name] for slots, name in places])
        for (slots, name), value in zip(places, moved, strict=True):
            slots[name] = value

    def take_transfers(self) -> dict[str, tuple[float, int]]:
        """See `TrainEngine.take_transfers`."""
        first, second = self._parameters_host.take(), self._optimizer_host.take()
        return {way: (first[way][0] + second[way][0], first[way][1] + second[way][1]) for way in first}

    def bytes_by_device(self) -> dict[str, int]:
        """Bytes of this rank's shards: "parameters@DEVICE" and "optimizer@DEVICE"."""
        total: Counter[str] = Counter()
        moments = [value for slots in self._slots.values() for value in slots.values()]
        for kind, tensors in (("parameters", self.module.parameters()), ("optimizer", moments)):
            for tensor in tensors:
                shard = local(tensor.detach())
                total[f"{kind}@{shard.device}"] += sum(part.nbytes for part in leaves(shard))
        return dict(total)

    def copy_in(self, stream: Iterable[tuple[str, Tensor]], *, whole: bool) -> None:
        """Takes over full tensors by Hugging Face name, each rank its shards; optimizer state stays.

        Args:
            whole: whether the stream must hold every weight of the model.

        Raises:
            EngineError: a name of this model that is missing, one that is unknown or comes twice, a
                tensor of another shape; a model with adapters.
        """
        self.adapters.check_whole()
        mine, left = self._mine(), self.shapes()
        for name, value in stream:
            shape = left.pop(name, None)
            if shape is None or shape != value.shape:
                problem = "unknown, or comes twice" if shape is None else "of another shape"
                raise EngineError(
                    f"the weight {name} is {problem}",
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
        """The `checksum` of this rank's shard in `dtype`, by Hugging Face name; the checksums of the ranks of
        one copy add up to that of the whole. Collective where there are adapters."""
        mine = self._mine().items()
        sums = {name: shards.part_checksum(self.adapters.merged(value), dtype) for name, value in mine}
        return sums if self._stages is None else self._stages.completed(sums)

    def weights(self, dtype: torch.dtype, names: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.weights`."""
        mine, stages = self._mine(), self._stages
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
        """See `TrainEngine.output_head`."""
        names = [name for name, p in self.named().items() if p is self.module.output_layer.weight]
        (head,) = (value.clone() for _, value in self.weights(dtype, names))
        return head

    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of all the model's weights, without adapters, by Hugging Face name, whatever this rank
        has of them."""
        if self._stages is not None:
            return dict(self._stages.shapes)
        return {name: parameter.shape for name, parameter in self._mine().items()}

    def counts(self) -> dict[str, int]:
        """parameters of the model, with adapters; trainable_parameters."""
        mine = self.named().items()
        whole = sum(shape.numel() for shape in self.shapes().values())
        whole += sum(p.numel() for name, p in mine if is_adapter(name))
        if self.adapters:
            learns = sum(p.numel() for _, p in mine if p.requires_grad)
        else:
            learns = whole if self.optimizers else 0
        return {"parameters": whole, "trainable_parameters": learns}

    def _mine(self) -> dict[str, Tensor]:
        """The parameters of `named` that are no adapters."""
        return {name: p for name, p in self.named().items() if not is_adapter(name)}

    def named(self) -> dict[str, Tensor]:
        """The parameters of this rank's stage by Hugging Face name, adapters by peft's; tied ones once."""
        return {self.module.hf_name(name): p for name, p in self.module.named_parameters()}

    def _state_dict(self, version: int) -> dict[str, Any]:
        """Tensors by Hugging Face name; a load writes into these very tensors. With adapters only what is
        trained, and what tells the base again."""
        named = self.named()
        state: dict[str, Any] = self.adapters.state(named) if self.adapters else {}
        named = trained(named) if self.adapters else named
        state["model"] = {name: p.detach() for name, p in named.items()}
        if self.optimizers:
            state["optimizer"] = {name: self._slots[p] for name, p in named.items()}
        state["version"] = torch.tensor(version)
        return state

    def save(self, path: Path, version: int) -> None:
        """Every rank writes its shards into the folder `path`. Collective.

        Raises:
            OSError, RuntimeError: what writing met with, on the first rank that failed.
        """
        _write(self._state_dict(version), path, None)

    def stage(self, path: Path, version: int) -> Callable[[], None]:
        """A copy of what `save` writes, on the host, for writing while training goes on. Collective.

        Returns:
            what writes it, on every rank, on any thread; raises as `save`.
        """
        if self._writers is None:  # collectives of a thread of its own must not meet those of training
            self._writers = dist.new_group(backend="gloo")
        state = tree_map(_host_copy, self._state_dict(version))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return functools.partial(_write, state, path, self._writers)

    def load(self, path: Path) -> int:
        """Reads what `save` wrote, resharding as needed. Collective.

        Returns:
            The version of the saved weights.

        Raises:
            CheckpointError: unreadable, or not of this model, its adapters and optimizer.
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
                remedy="resume from an earlier checkpoint, with the model it was saved from",
            ) from error
        return int(state["version"])


def _write(state: dict[str, Any], path: Path, group: dist.ProcessGroup | None) -> None:
    try:
        save_shards(state, checkpoint_id=path, process_group=group)
    except CheckpointException as error:  # no Exception to PyTorch; callers clean up after one
        raise next(cause for cause, _ in error.failures.values()) from error


def _host_copy(value: Tensor) -> Tensor:
    """In pinned memory where it comes from a GPU, so that the copies of all tensors overlap."""
    shard = local(value)
    host = torch.empty_like(shard, device="cpu", pin_memory=shard.is_cuda)
    host.copy_(shard, non_blocking=True)
    return joined(host, value._spec) if isinstance(value, DTensor) else host
