"""The paged KV cache and the step input of the native engine.

The cache is divided into blocks of `block_size` tokens. A sequence's block table lists the sequence's blocks
in order, so that token t is in slot `table[t // block_size] * block_size + t % block_size`. Sequences share
blocks with the same content. A step mixes sequences that decode one token with chunks of prompts. The tokens
of all sequences in a step are concatenated.

Keys are stored transposed within a block, (blocks, kv_heads, key_dim, block_size), so that one vector
register holds one key coordinate of several adjacent tokens. Values are (blocks, kv_heads, block_size,
value_dim).

Shape suffixes: T tokens of a step, S sequences of a step, B blocks of the widest table, L tokens whose logits
are requested, N query heads, H key heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engines.rollout.native.lasting import Lasting


class LayerShape(NamedTuple):
    """The shape of the KV-cache entry that one attention layer stores per token."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Sight:
    """What the queries of a layer see, and how their scores become weights.

    A query at position p sees the columns `first(p)` to p of its sequence.

    Attributes:
        window: Only the last `window` columns are seen. 0 means no limit.
        chunk: Only columns of the query's own chunk are seen. Chunks begin at the multiples of `chunk`. 0
            means no limit.
        softcap: A score x is replaced by softcap * tanh(x / softcap). 0 means no softcap.
        sinks_N: One more logit per query head in the softmax, which takes weight but has no value. None means
            no such logit.
    """

    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks_N: Tensor | None = None

    @property
    def reach(self) -> int:
        """Return how many of the last columns a query may see. 0 means all."""
        return min((limit for limit in (self.window, self.chunk) if limit), default=0)

    def first(self, positions: Tensor) -> Tensor:
        """Return the first column that a query at each position sees."""
        first = torch.zeros_like(positions)
        if self.window:
            first = (positions - self.window + 1).clamp(min=0)
        if self.chunk:
            first = torch.maximum(first, positions // self.chunk * self.chunk)
        return first


FULL = Sight()
"""All columns up to the query's own."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """The input of one step: tokens and block tables, sequence by sequence, on the engine's device.

    Attributes:
        ids_T: int64, the token ids.
        positions_T: int64, each token's position in its sequence.
        slots_T: int64, the cache slot for each token's key and value. -1 for a padding token.
        starts_S1: int32 (S+1), the index of each sequence's first token among the T tokens. The last entry is
            T.
        lengths_S: int32, the number of each sequence's tokens in the cache after this step's tokens are
            written.
        tables_SB: int32, the block tables. Entries beyond a sequence's length may be any valid block.
        logits_L: int64, the tokens (indices into T) whose next-token logits are requested.
        max_query: The maximum number of tokens of a sequence in this step. 1 for a decode step.
        max_length: The largest number in `lengths_S`.
    """

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    starts_S1: Tensor
    lengths_S: Tensor
    tables_SB: Tensor
    logits_L: Tensor
    max_query: int
    max_length: int


@dataclass(eq=False)
class PagedCache:
    """The paged KV cache, which stores the keys and values of all running sequences in blocks.

    Args:
        layers: The shape of each attention layer.
        blocks: The number of blocks. Blocks are numbered 0..blocks-1.
        block_size: The number of tokens per block.
        dtype: The dtype of keys and values.
        device: The device.
        lasting: Whether to use memory that can be freed and allocated again at the same addresses, if the
            device supports it.

    Attributes:
        memory: The memory of the cache, which can be freed. None unless `lasting` is set.
    """

    layers: Sequence[LayerShape]
    blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    lasting: bool = False

    def __post_init__(self) -> None:
        layers, blocks, block_size = tuple(self.layers), self.blocks, self.block_size
        self.layers = layers
        shapes = [(blocks, layer.kv_heads, layer.key_dim, block_size) for layer in layers]
        shapes += [(blocks, layer.kv_heads, block_size, layer.value_dim) for layer in layers]
        self.memory: Lasting | None = None
        if self.lasting:
            self.memory = Lasting([(shape, self.dtype) for shape in shapes], self.device)
            parts = self.memory.tensors
        else:
            parts = [torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes]
        self.keys, self.values = parts[: len(layers)], parts[len(layers) :]

    @property
    def bytes(self) -> int:
        return self.blocks * self.block_size * bytes_per_token(self.layers, self.dtype)

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks in every layer. `source` and `target` are int64 block numbers.

        All targets must be distinct, and no target may be a source.
        """
        for part in (*self.keys, *self.values):
            part[target] = part[source]


def bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    return sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers) * dtype.itemsize


def dense_rows(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if its last dimension is not contiguous, as the kernels require."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
