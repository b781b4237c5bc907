"""What a training step changes: sharded parameters and the optimizer's state; their norm, update,
place and checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from tandem.config.optim import OptimConfig
from tandem.engines.train import shards
from tandem.engines.train.gradients import clip, gradient_norm
from tandem.engines.train.optimizers import build_optimizers, set_learning_rate
from tandem.errors import CheckpointError, EngineError
from tandem.models.collectives import CollectiveMeter
from tandem.models.policy import PolicyModel
from tandem.models.score import ScoreModel
from tandem.models.tensor_group import local
from tandem.models.value import ValueModel


class TrainState:
    """Parameters of a sharded module and the optimizers that update them.

    Args:
        module: sharded by FSDP2, with every parameter in its final place.
        optim: the optimizer's numbers; None for a frozen module.
        meter: counts the optimizer's collectives.

    Raises:
        ConfigError: an optimizer whose library is not installed.
    """

    def __init__(
        self,
        module: PolicyModel | ValueModel | ScoreModel,
        optim: OptimConfig | None,
        meter: CollectiveMeter,
    ) -> None:
        self.module = module
        self._writers: dist.ProcessGroup | None = None
        self._stays = optim is not None and optim.optimizer == "adamw_cpu"
        layers: Any = module.decoder.layers
        self.optimizers = [] if optim is None else build_optimizers(module, layers, optim, meter)
        self._slots = {p: slots for optimizer in self.optimizers for p, slots in optimizer.state.items()}

    def gradient_norm(self) -> Tensor:
        """Euclidean norm of the whole gradient over all ranks; a float64 scalar on the device."""
        return gradient_norm(self.module.parameters())

    def step(self, lr: float, grad_norm: Tensor, clip_grad: float) -> None:
        """One optimizer step with the gradient scaled to norm `clip_grad` if it is longer."""
        assert self.optimizers
        clip(self.module.parameters(), grad_norm, clip_grad)
        for optimizer in self.optimizers:
            set_learning_rate(optimizer, lr)
            optimizer.step()

    def zero_grad(self) -> None:
        self.module.zero_grad(set_to_none=True)

    def move(self, device: torch.device | str, *, parameters: bool, optimizer: bool) -> None:
        if parameters:
            self.module.to(device)
        if optimizer and not self._stays:
            for slots in self._slots.values():
                for name, value in slots.items():
                    if value.ndim:  # counters stay where their update reads them
                        slots[name] = value.to(device)

    def bytes_by_device(self) -> dict[str, int]:
        """Bytes of this rank's shards: "parameters@DEVICE" and "optimizer@DEVICE"."""
        total: dict[str, int] = {}
        for kind, tensors in (("parameters", self.module.parameters()), ("optimizer", self._moments())):
            for tensor in tensors:
                shard = local(tensor.detach())
                key = f"{kind}@{shard.device}"
                total[key] = total.get(key, 0) + _bytes(shard)
        return total

    def _moments(self) -> Iterator[Tensor]:
        for slots in self._slots.values():
            yield from slots.values()

    def copy_in(self, stream: Iterable[tuple[str, Tensor]], *, whole: bool) -> None:
        """Takes over full tensors by Hugging Face name, each rank its shards; optimizer state stays.

        Args:
            whole: whether the stream must hold every weight of the model.

        Raises:
            EngineError: a name of this model that is missing, one that is unknown or comes twice, a
                tensor of another shape.
        """
        left = self.named()
        for name, value in stream:
            parameter = left.pop(name, None)
            if parameter is None or parameter.shape != value.shape:
                problem = "unknown, or comes twice" if parameter is None else "of another shape"
                raise EngineError(
                    f"the weight {name} is {problem}",
                    field=name,
                    got=tuple(value.shape),
                    expected=None if parameter is None else tuple(parameter.shape),
                    remedy="load weights of the same model",
                )
            shards.copy_in(parameter.detach(), value)
        if whole and left:
            raise EngineError(
                f"{len(left)} weights are missing, the first is {next(iter(left))}",
                field=next(iter(left)),
                remedy="load all weights of the model",
            )

    def checksums(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """By Hugging Face name the `checksum` of this rank's shard in `dtype`; those of the ranks of
        one copy add up to that of the whole."""
        return {name: shards.part_checksum(value.detach(), dtype) for name, value in self.named().items()}

    def named(self) -> dict[str, Tensor]:
        """The parameters by Hugging Face name; tied ones once."""
        return {self.module.hf_name(name): p for name, p in self.module.named_parameters()}

    def _state_dict(self, version: int) -> dict[str, Any]:
        """Tensors by Hugging Face name; a load writes into these very tensors."""
        named = self.named()
        state: dict[str, Any] = {"model": {name: p.detach() for name, p in named.items()}}
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
            CheckpointError: unreadable, or not of this model and optimizer.
        """
        if not (path / ".metadata").is_file():
            raise CheckpointError("no training state in this folder", got=path)
        state = self._state_dict(0)
        try:
            load_shards(state, checkpoint_id=path)
        except (CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
            causes = [cause for cause, _ in getattr(error, "failures", {}).values()] or [error]
            raise CheckpointError(
                "the training state cannot be loaded",
                got=f"{path}: {causes[0]}",
                remedy="resume from an earlier checkpoint, with the model it was saved from",
            ) from error
        return int(state["version"])


def _bytes(shard: Tensor) -> int:
    """That it takes in memory; one of 8 bits is made of several tensors."""
    flatten = getattr(shard, "__tensor_flatten__", None)
    if flatten is not None:
        return sum(_bytes(getattr(shard, name)) for name in flatten()[0])
    return shard.numel() * shard.element_size()


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
    if not isinstance(value, DTensor):
        return host
    return DTensor(host, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
