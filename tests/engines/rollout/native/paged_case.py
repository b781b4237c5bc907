"""A step over a paged cache, and a reference that computes one query head of one token at a time."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tandem.engines.rollout.native.attention import make_attention
from tandem.engines.rollout.native.paged import LayerShape, PagedCache, StepInput

CPU = torch.device("cpu")
# Lengths after the step, and how many of these tokens the step brings: decode, chunks and whole prompts
# mixed.
MIXED = [(130, 1), (33, 17), (1, 1), (9, 9), (517, 3), (300, 1)]
DECODE = [(1, 1), (16, 1), (17, 1), (255, 1), (256, 1), (257, 1), (600, 1)]


OPTIONS = [(0, 0.0), (20, 0.0), (0, 3.0), (5, 2.0)]


class Case:
    """A step over a cache of random keys and values at scattered block numbers."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        dtype: torch.dtype = torch.float64,
        *,
        group: int = 2,
        kv_heads: int = 2,
        key_dim: int = 16,
        value_dim: int | None = None,
        block_size: int = 16,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(length for length, _ in sequences) + group + key_dim)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        value_dim = value_dim or key_dim
        longest = max(length for length, _ in sequences)
        width = -(-longest // block_size)
        numbers = torch.randperm(len(sequences) * width + 5, generator=generator)
        tables = numbers[: len(sequences) * width].view(len(sequences), width)
        self.cache = PagedCache(
            [LayerShape(kv_heads, key_dim, value_dim)], len(numbers), block_size, dtype, CPU
        )
        self.keys = [normal(length, kv_heads, key_dim) for length, _ in sequences]
        self.values = [normal(length, kv_heads, value_dim) for length, _ in sequences]
        self.counts = [count for _, count in sequences]
        positions = [torch.arange(length - count, length) for length, count in sequences]
        for keys, values, table, count in zip(self.keys, self.values, tables, self.counts, strict=True):
            for place in range(len(keys) - count):  # tokens of earlier steps
                block, offset = table[place // block_size], place % block_size
                self.cache.keys[0][block, :, :, offset] = keys[place]
                self.cache.values[0][block, :, offset] = values[place]
        tokens = sum(self.counts)
        self.step = StepInput(
            ids_T=torch.zeros(tokens, dtype=torch.int64),
            positions_T=torch.cat(positions),
            slots_T=torch.cat(
                [
                    t[p // block_size] * block_size + p % block_size
                    for t, p in zip(tables, positions, strict=True)
                ]
            ),
            starts_S1=torch.tensor([0, *self.counts]).cumsum(0).int(),
            lengths_S=torch.tensor([length for length, _ in sequences]).int(),
            tables_SB=tables.int(),
            logits_L=torch.arange(tokens),
            max_query=max(self.counts),
            max_length=longest,
        )
        self.query = normal(tokens, kv_heads * group, key_dim) / key_dim**0.5
        self.new_keys = torch.cat([k[-c:] for k, c in zip(self.keys, self.counts, strict=True)])
        self.new_values = torch.cat([v[-c:] for v, c in zip(self.values, self.counts, strict=True)])

    def expected(self, window: int, softcap: float) -> Tensor:
        """Compute the attention of one query head of one token at a time, in float64."""
        out = []
        starts = self.step.starts_S1.tolist()
        for number, (start, stop) in enumerate(pairwise(starts)):
            keys, values = self.keys[number].double(), self.values[number].double()
            group = self.query.shape[1] // keys.shape[1]
            for token in range(start, stop):
                last = int(self.step.positions_T[token]) + 1
                first = max(0, last - window) if window else 0
                heads = []
                for head, query in enumerate(self.query[token].double()):
                    scores = keys[first:last, head // group] @ query
                    if softcap:
                        scores = softcap * torch.tanh(scores / softcap)
                    heads.append(scores.softmax(0) @ values[first:last, head // group])
                out.append(torch.stack(heads))
        return torch.stack(out)

    def check(self, name: str, tolerance: float, window: int = 0, softcap: float = 0.0) -> None:
        attention = make_attention(self.cache, name)
        attention.write(0, self.step, self.new_keys, self.new_values)
        out = attention.attend(0, self.step, self.query, window=window, softcap=softcap)
        assert out.dtype == self.cache.dtype and out.is_contiguous()
        expected = self.expected(window, softcap)
        error = (out.double() - expected).abs().max() / expected.abs().max()
        assert error < tolerance
