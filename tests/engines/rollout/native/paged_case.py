"""A step over a paged cache, and a reference that computes one query head of one token at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tandem.engines.rollout.native.attention import make_attention
from tandem.engines.rollout.native.paged import FULL, LayerShape, PagedCache, Sight
from tests.engines.rollout.case import CPU, step_of

# Lengths after the step, and how many of these tokens it brings: decode, chunks and whole prompts mixed.
MIXED = [(130, 1), (33, 17), (1, 1), (9, 9), (517, 3), (300, 1)]
DECODE = [(1, 1), (16, 1), (17, 1), (255, 1), (256, 1), (257, 1), (600, 1)]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let PyTorch use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


class Case:
    """A step of sequences at scattered blocks. All that no query of the step sees in the cache is NaN."""

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
        device: torch.device = CPU,
        sight: Sight = FULL,
    ) -> None:
        lengths, counts = zip(*sequences, strict=True)
        self.sight = sight
        generator = torch.Generator().manual_seed(sum(lengths) + group + key_dim)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

        shape = LayerShape(kv_heads, key_dim, value_dim or key_dim)
        width = -(-max(lengths) // block_size) + 2  # entries beyond a sequence's length are any block
        numbers = torch.randperm(len(lengths) * width + 5, generator=generator).int().to(device)
        tables = numbers[: len(lengths) * width].view(len(lengths), width)
        self.step = step_of(tables, lengths, counts, block_size)
        self.cache = PagedCache([shape], len(numbers), block_size, dtype, device)
        for part in (self.cache.keys[0], self.cache.values[0]):
            part.fill_(torch.nan)
        self.keys = [normal(length, kv_heads, shape.key_dim) for length in lengths]
        self.values = [normal(length, kv_heads, shape.value_dim) for length in lengths]
        for keys, values, table, count in zip(self.keys, self.values, tables, counts, strict=True):
            # The tokens of earlier steps, from the block on that the first query sees.
            seen = self.first(len(keys) - count) // block_size * block_size
            places = torch.arange(seen, len(keys) - count, device=device)
            blocks, offsets = table[places // block_size].long(), places % block_size
            self.cache.keys[0][blocks, :, :, offsets] = keys[places]
            self.cache.values[0][blocks, :, offsets] = values[places]
        self.query = normal(sum(counts), kv_heads * group, key_dim) / key_dim**0.5
        self.new_keys = torch.cat([k[-c:] for k, c in zip(self.keys, counts, strict=True)])
        self.new_values = torch.cat([v[-c:] for v, c in zip(self.values, counts, strict=True)])

    def first(self, position: int) -> int:
        """Return the first column that a query at this position sees."""
        window, chunk = (limit or position + 1 for limit in (self.sight.window, self.sight.chunk))
        near = (j for j in range(position + 1) if position - j < window)
        return next(j for j in near if j // chunk == position // chunk)

    def expected(self) -> Tensor:
        """Compute the attention of one query head of one token at a time, in float64."""
        out, softcap, sinks = [], self.sight.softcap, self.sight.sinks_N
        for number, (start, stop) in enumerate(pairwise(self.step.starts_S1.tolist())):
            keys, values = self.keys[number].double(), self.values[number].double()
            group = self.query.shape[1] // keys.shape[1]
            for token in range(start, stop):
                last = int(self.step.positions_T[token]) + 1
                first, heads = self.first(last - 1), []
                for head, query in enumerate(self.query[token].double()):
                    scores = keys[first:last, head // group] @ query
                    if softcap:
                        scores = softcap * torch.tanh(scores / softcap)
                    sink = scores.new_empty(0) if sinks is None else sinks[head : head + 1].double()
                    weights = torch.cat((scores, sink)).softmax(0)[: len(scores)]
                    heads.append(weights @ values[first:last, head // group])
                out.append(torch.stack(heads))
        return torch.stack(out)

    def check(self, attention: Any, tolerance: float) -> None:
        """Compare an attention, or the attention of a name, with the reference."""
        if isinstance(attention, str):
            attention = make_attention(self.cache, attention)
        attention.write(0, self.step, self.new_keys, self.new_values)
        out = attention.attend(0, self.step, self.query, self.sight)
        assert out.dtype == self.cache.dtype and out.is_contiguous()
        expected = self.expected()
        assert (out.double() - expected).abs().max() < tolerance * expected.abs().max()
