"""What a training step changes: sharded parameters and the optimizer's state; their norm, update,
place and checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor, distribute_tensor

from tandem.config.optim import OptimConfig
from tandem.engines.weight_sync import checksum
from tandem.errors import CheckpointError, EngineError
from tandem.models.policy import PolicyModel
from tandem.models.score import ScoreModel
from tandem.models.value import ValueModel


class TrainState:
    """Parameters of a sharded module and the AdamW that updates them.

    Args:
        module: sharded by FSDP2, with every parameter in its final place.
        optim: the optimizer's numbers; None for a frozen module.
    """

    def __init__(self, module: PolicyModel | ValueModel | ScoreModel, optim: OptimConfig | None) -> None:
        self.module = module
        self.optimizer: torch.optim.AdamW | None = None
        if optim is not None:
            self.optimizer = torch.optim.AdamW(
                module.parameters(),
                lr=optim.lr,
                betas=(optim.betas[0], optim.betas[1]),
                eps=optim.eps,
                weight_decay=optim.weight_decay,
                fused=True,
            )
            self._allocate(self.optimizer)

    def _allocate(self, optimizer: torch.optim.AdamW) -> None:
        """AdamW's state before the first step, so that memory is known from the start and
        a checkpoint of version 0 is complete."""
        for parameter in self.module.parameters():
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }

    def gradient_norm(self) -> Tensor:
        """Euclidean norm of the whole gradient over all ranks; a scalar on the device."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, lr: float, grad_norm: Tensor, clip_grad: float) -> None:
        """One AdamW step with the gradient scaled to norm `clip_grad` if it is longer."""
        assert self.optimizer is not None
        scale = (clip_grad / (grad_norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local(p.grad) for p in self.module.parameters() if p.grad is not None], scale)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.module.zero_grad(set_to_none=True)

    def move(self, device: torch.device | str, *, parameters: bool, optimizer: bool) -> None:
        if parameters:
            self.module.to(device)
        if optimizer and self.optimizer is not None:
            for state in self.optimizer.state.values():
                for name, value in state.items():
                    state[name] = value.to(device)

    def bytes_by_device(self) -> dict[str, int]:
        """Bytes of this rank's shards: "parameters@DEVICE" and "optimizer@DEVICE"."""
        total: dict[str, int] = {}
        for kind, tensors in (("parameters", self.module.parameters()), ("optimizer", self._moments())):
            for tensor in tensors:
                shard = local(tensor.detach())
                key = f"{kind}@{shard.device}"
                total[key] = total.get(key, 0) + shard.numel() * shard.element_size()
        return total

    def _moments(self) -> Iterator[Tensor]:
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                yield from state.values()

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
            _copy_shard(parameter.detach(), value)
        if whole and left:
            raise EngineError(
                f"{len(left)} weights are missing, the first is {next(iter(left))}",
                field=next(iter(left)),
                remedy="load all weights of the model",
            )

    def checksums(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """By Hugging Face name the `checksum` of this rank's shard in `dtype`; all ranks' add up to that of
        the whole."""
        return {
            name: checksum(local(value.detach()).to(dtype), _first_row(value))
            for name, value in self.named().items()
        }

    def named(self) -> dict[str, Tensor]:
        """The parameters by Hugging Face name; tied ones once."""
        return {self.module.hf_name(name): p for name, p in self.module.named_parameters()}

    def _state_dict(self, version: int) -> dict[str, Any]:
        """Tensors by Hugging Face name; a load writes into these very tensors."""
        named = self.named()
        state: dict[str, Any] = {"model": {name: p.detach() for name, p in named.items()}}
        if self.optimizer is not None:
            state["optimizer"] = {name: self.optimizer.state[p] for name, p in named.items()}
        state["version"] = torch.tensor(version)
        return state

    def save(self, path: Path, version: int) -> None:
        """Every rank writes its shards into the folder `path`. Collective.

        Raises:
            OSError, RuntimeError: what writing met with, on the first rank that failed.
        """
        try:
            save_shards(self._state_dict(version), checkpoint_id=path)
        except CheckpointException as error:  # no Exception to PyTorch; callers clean up after one
            raise next(cause for cause, _ in error.failures.values()) from error

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


def local(tensor: Tensor) -> Tensor:
    """This rank's shard; the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _first_row(value: Tensor) -> int:
    """The number of this rank's first row, of the rows that `checksum` counts. FSDP cuts the first dimension
    into shares of equal size, rounded up; the last ones may be smaller, or empty."""
    assert isinstance(value, DTensor), "no shard: the model is unsharded"
    mesh = value.device_mesh
    first = min(mesh.get_local_rank() * -(-value.shape[0] // mesh.size()), value.shape[0])
    return first * math.prod(value.shape[1:-1])


def _copy_shard(parameter: Tensor, value: Tensor) -> None:
    """Every rank has the whole value, so nothing is sent."""
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        value = distribute_tensor(value, mesh, placements, src_data_rank=None)
    local(parameter).copy_(local(value))
