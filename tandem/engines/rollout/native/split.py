"""Layers of the rollout engine split over several ranks, after Megatron-LM (Shoeybi et al. 2019, arXiv
1909.08053, section 3): each rank has some heads and some columns of the MLP, and what the ranks' output and
down projections give is summed. All ranks of a group run the same steps on the same requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tandem.config.model import SHARED_OUT
from tandem.errors import ConfigError

Weights = tuple[Tensor, Tensor | None]
"""Weight and bias of a linear map."""


@dataclass(frozen=True)
class LayerSplit:
    """A rank's place among those that split the layers.

    Attributes:
        rank, size: in the group.
        group: None where one rank has all.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def check(self, config: Any) -> None:
        """Check that a model's layers can be split evenly.

        Args:
            config: a transformers config of a language model.

        Raises:
            ConfigError: heads or MLP columns that cannot be shared out evenly.
        """
        for name in SHARED_OUT:
            count = getattr(config, name, None)
            if count is not None and count % self.size:
                raise ConfigError(
                    "the rollout engine cannot split this model evenly",
                    field="actor_rollout_ref.rollout.tensor_model_parallel_size",
                    got=f"{self.size}, {name}={count}",
                    expected=f"a divisor of {count}",
                    remedy="take fewer devices per layer; further devices take further samples",
                )

    def heads(self, config: Any) -> tuple[int, int]:
        """Return how many query heads and how many key heads of each layer are this rank's."""
        heads = config.num_attention_heads
        return heads // self.size, (config.num_key_value_heads or heads) // self.size

    def outputs(self, part: nn.Linear) -> Weights:
        """The rows of the weight, the map's outputs, that are this rank's."""
        bias = None if part.bias is None else self._share(part.bias.detach(), 0)
        return self._share(part.weight.detach(), 0), bias

    def inputs(self, part: nn.Linear) -> Weights:
        """The columns of the weight, the map's inputs, that are this rank's; one rank adds the bias."""
        bias = part.bias.detach() if part.bias is not None and self.rank == 0 else None
        return self._share(part.weight.detach(), 1), bias

    def summed(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place; the same bits on all of them."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def side_by_side(self, x_LV: Tensor) -> Tensor:
        """The columns of all ranks, side by side."""
        if self.group is None:
            return x_LV
        parts = [torch.empty_like(x_LV) for _ in range(self.size)]
        dist.all_gather(parts, x_LV.contiguous(), group=self.group)
        return torch.cat(parts, -1)

    def smallest(self, value: int) -> int:
        """The smallest of all ranks' values."""
        if self.group is None:
            return value
        given = torch.tensor(value, device="cuda" if dist.get_backend(self.group) == "nccl" else "cpu")
        dist.all_reduce(given, dist.ReduceOp.MIN, group=self.group)
        return int(given)

    def _share(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(self.size, dim)[self.rank] if self.size > 1 else tensor


WHOLE = LayerSplit()
"""Layers that are not split: one rank has all."""
