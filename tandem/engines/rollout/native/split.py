"""Tensor parallelism of the rollout engine: layers that are split over several ranks.

The split follows Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3). Each rank has some of the
heads and some of the MLP columns. The outputs of the output projections and of the down projections are
summed over the ranks. All ranks of a group run the same steps on the same requests.
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
"""The weight and the bias (or None) of a linear layer."""


@dataclass(frozen=True)
class LayerSplit:
    """The tensor-parallel group of a rank, and the rank's shards of the layers.

    Attributes:
        rank: The rank in the group.
        size: The number of ranks in the group.
        group: The process group. None if the layers are not split.
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
        """Return the number of query heads and the number of key heads of each layer on this rank."""
        heads = config.num_attention_heads
        return heads // self.size, (config.num_key_value_heads or heads) // self.size

    def outputs(self, part: nn.Linear) -> Weights:
        """Return this rank's shard of the layer's outputs: rows of the weight, and their biases."""
        bias = None if part.bias is None else self._share(part.bias.detach(), 0)
        return self._share(part.weight.detach(), 0), bias

    def inputs(self, part: nn.Linear) -> Weights:
        """Return this rank's shard of the layer's inputs: columns of the weight.

        The bias is returned on only one rank, because the outputs are summed.
        """
        bias = part.bias.detach() if part.bias is not None and self.rank == 0 else None
        return self._share(part.weight.detach(), 1), bias

    def summed(self, x: Tensor) -> Tensor:
        """Sum over all ranks, in place. All ranks get the same bits."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def side_by_side(self, x_LV: Tensor) -> Tensor:
        """Return the columns of all ranks, concatenated in the order of the ranks."""
        if self.group is None:
            return x_LV
        parts = [torch.empty_like(x_LV) for _ in range(self.size)]
        dist.all_gather(parts, x_LV.contiguous(), group=self.group)
        return torch.cat(parts, -1)

    def smallest(self, value: int) -> int:
        """Return the minimum of `value` over all ranks."""
        if self.group is None:
            return value
        given = torch.tensor(value, device="cuda" if dist.get_backend(self.group) == "nccl" else "cpu")
        dist.all_reduce(given, dist.ReduceOp.MIN, group=self.group)
        return int(given)

    def _share(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(self.size, dim)[self.rank] if self.size > 1 else tensor


WHOLE = LayerSplit()
"""The split of a single rank that has all layers whole."""
