"""The paged KV cache and the step input of the native engine.

The cache is divided into blocks of `block_size` tokens. A sequence's block table lists the sequence's blocks
in order, so that token t is in slot `table[t // block_size] * block_size + t % block_size`. There is one
table for each group of layers with the same window (see `LayerGroups`). Entries of blocks behind the window
have no meaning. Sequences share blocks with the same content. A step mixes sequences that decode one token
with chunks of prompts. The tokens of all sequences in a step are concatenated.

Keys are stored transposed within a block, (blocks, kv_heads, key_dim, block_size), so that one vector
register holds one key coordinate of several adjacent tokens. Values are (blocks, kv_heads, block_size,
value_dim).

Shape suffixes: T tokens of a step, S sequences of a step, B blocks of the widest table, G groups of layers, L
tokens whose logits are requested, N query heads, H key heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engines.rollout.native.lasting import Lasting, Spec
from tandem.memory.cache import LayerGroups, layer_groups


class LayerShape(NamedTuple):
    """The shape of the KV-cache entry that one attention layer stores per token.

    Attributes:
        kv_heads: The number of key heads.
        key_dim: The size of a key.
        value_dim: The size of a value.
        window: How many of the last tokens the layer needs. 0 means all tokens.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0


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

    def window_of(self, max_length: int) -> int:
        """Return how many of the last tokens a layer needs, of sequences up to `max_length`. 0 means all."""
        return min((limit for limit in (self.window, self.chunk) if 0 < limit < max_length), default=0)

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
        levels_T: int64, the level of each token's sequence (see `AngleTables`).
        starts_S1: int32 (S+1), the index of each sequence's first token among the T tokens. The last entry is
            T.
        lengths_S: int32, the number of each sequence's tokens in the cache after this step's tokens are
            written.
        logits_L: int64, the tokens (indices into T) whose next-token logits are requested.
        slots_GT: For each group of layers, int64 (T), the cache slot for each token's key and value. -1 for a
            padding token.
        tables_GSB: For each group of layers, int32 (S, B), the block tables. Entries beyond a sequence's
            length, and those of blocks that no token sees, may be any valid block.
        max_query: The maximum number of tokens of a sequence in this step. 1 for a decode step.
        max_length: The largest number in `lengths_S`.
    """

    ids_T: Tensor
    positions_T: Tensor
    levels_T: Tensor
    starts_S1: Tensor
    lengths_S: Tensor
    logits_L: Tensor
    slots_GT: tuple[Tensor, ...]
    tables_GSB: tuple[Tensor, ...]
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
        record_bytes: The number of bytes per token that are stored beside keys and values (see `record`). If
            it is not 0, a layer must keep all tokens.

    Attributes:
        groups: The groups of layers that have their own block tables.
        group: For each layer, the number of its group.
        keys: For each layer, the keys of all blocks. Layers of different groups share the memory.
        values: For each layer, the values of all blocks.
        parts: The tensors that hold the keys and values, each once.
        memory: The memory of the cache, which can be freed. None unless `lasting` is set.
    """

    layers: Sequence[LayerShape]
    blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    lasting: bool = False
    record_bytes: int = 0

    def __post_init__(self) -> None:
        self.layers = tuple(self.layers)
        self.groups = groups_of(self.layers)
        blocks, block_size, kinds = self.blocks, self.block_size, self.layers[: self.groups.size]
        shapes = [(blocks, kind.kv_heads, kind.key_dim, block_size) for kind in kinds]
        shapes += [(blocks, kind.kv_heads, block_size, kind.value_dim) for kind in kinds]
        specs: list[Spec] = [(shape, self.dtype) for shape in shapes]
        if self.record_bytes:  # padding tokens, whose slot is -1, write into one more block
            specs.append(((blocks + 1, block_size, self.record_bytes), torch.uint8))
        self.memory: Lasting | None = None
        if self.lasting:
            self.memory = Lasting(specs, self.device)
            self.parts = list(self.memory.tensors)
        else:
            self.parts = [torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in specs]
        self.group = [group for group, _ in self.groups.places]
        self.keys = [self.parts[place] for _, place in self.groups.places]
        self.values = [self.parts[len(kinds) + place] for _, place in self.groups.places]

    @property
    def bytes(self) -> int:
        return self.blocks * self.block_size * bytes_per_token(self.layers, self.dtype, self.record_bytes)

    def record(self, step: StepInput, values_T: Tensor) -> None:
        """Store `record_bytes` bytes for each token of a step, in the group of layers that keeps all tokens.

        Args:
            step: The step.
            values_T: (T, …) Contiguous values of any dtype.
        """
        slots_T = step.slots_GT[self.groups.windows.index(0)]
        self.parts[-1].flatten(0, 1)[slots_T] = values_T.flatten(1).view(torch.uint8)

    def recorded(self, slots_T: Tensor) -> Tensor:
        """Return (T, record_bytes) uint8, what `record` stored for the tokens in these slots."""
        return self.parts[-1].flatten(0, 1)[slots_T]

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks in every layer. `source` and `target` are int64 block numbers.

        All targets must be distinct, and no target may be a source.
        """
        for part in self.parts:
            part[target] = part[source]


def groups_of(layers: Sequence[LayerShape]) -> LayerGroups:
    """Return the groups of layers with their own block tables.

    Layers of different sizes cannot share blocks. Then there is one group, which keeps all tokens.
    """
    alike = len({layer[:3] for layer in layers}) == 1
    return layer_groups([layer.window if alike else 0 for layer in layers])


def bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype, record_bytes: int = 0) -> int:
    """Return the bytes of one token in a block: those of the layers of one group, and those of the record."""
    kinds = layers[: groups_of(layers).size]
    entries = sum(kind.kv_heads * (kind.key_dim + kind.value_dim) for kind in kinds)
    return entries * dtype.itemsize + record_bytes


def dense_rows(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if its last dimension is not contiguous, as the kernels require."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
