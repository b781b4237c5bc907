"""Layers of the rollout engine that are split over several ranks.

The split follows Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3). Each rank has some heads and
some columns of the MLP. The results of the ranks' output and down projections are summed. All ranks of a
group run the same steps on the same requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tandem.config.model import SHARED_OUT
from tandem.errors import ConfigError

Weights = tuple[Tensor, Tensor | None]
"""The weight and bias of a linear map."""


@dataclass(frozen=True)
class LayerSplit:
    """A rank's place among the ranks that split the layers.

    Attributes:
        rank: The rank in the group.
        size: The number of ranks in the group.
        group: The process group. None if one rank has all layers whole.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def check(self, config: Any) -> None:
        """Check that a model's layers can be split evenly.

        Args:
            config: A transformers config of a language model.

        Raises:
            ConfigError: Heads or MLP columns cannot be divided evenly.
        """
        for name in SHARED_OUT:
            count = getattr(config, name, None)
            if count is not None and count % self.size:
                raise ConfigError(
                    "the rollout engine cannot split this model evenly",
                    field="actor_rollout_ref.rollout.tensor_model_parallel_size",
                    got=f"{self.size}, {name}={count}",
                    expected=f"a divisor of {count}",
                    remedy="use fewer devices per layer; the other devices then generate other samples",
                )

    def heads(self, config: Any) -> tuple[int, int]:
        """Return how many query heads and how many key heads of each layer this rank has."""
        heads = config.num_attention_heads
        return heads // self.size, (config.num_key_value_heads or heads) // self.size

    def outputs(self, part: nn.Linear) -> Weights:
        """Return this rank's rows of the weight, which are outputs of the map."""
        bias = None if part.bias is None else self._share(part.bias.detach(), 0)
        return self._share(part.weight.detach(), 0), bias

    def inputs(self, part: nn.Linear) -> Weights:
        """Return this rank's columns of the weight, which are inputs of the map.

        Only one rank adds the bias.
        """
        bias = part.bias.detach() if part.bias is not None and self.rank == 0 else None
        return self._share(part.weight.detach(), 1), bias

    def summed(self, x: Tensor) -> Tensor:
        """Sum over all ranks, in place. All ranks get the same bits."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def side_by_side(self, x_LV: Tensor) -> Tensor:
        """Return the columns of all ranks, side by side."""
        if self.group is None:
            return x_LV
        parts = [torch.empty_like(x_LV) for _ in range(self.size)]
        dist.all_gather(parts, x_LV.contiguous(), group=self.group)
        return torch.cat(parts, -1)

    def smallest(self, value: int) -> int:
        """Return the smallest value of all ranks."""
        if self.group is None:
            return value
        given = torch.tensor(value, device="cuda" if dist.get_backend(self.group) == "nccl" else "cpu")
        dist.all_reduce(given, dist.ReduceOp.MIN, group=self.group)
        return int(given)

    def _share(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(self.size, dim)[self.rank] if self.size > 1 else tensor


WHOLE = LayerSplit()
"""Layers that are not split: one rank has all."""
