"""Attention over the paged KV cache with Triton kernels, for CUDA devices.

A step in which every sequence has one token is a decode step. A decode step reads every key once. So it is
limited by memory bandwidth, provided that all of the device's processors read. If there are too few sequences
× key heads to use all processors, the columns of a sequence are divided among several programs. A second
kernel then combines the results of these programs (FlashDecoding). The number of programs depends only on
shapes, so that a CUDA graph can record the launch. All other steps are computed in tiles, each with the query
heads of a few tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from tandem.engines.rollout.native.attention.triton_kernels import (
    attend_kernel,
    combine_kernel,
    write_kernel,
)
from tandem.engines.rollout.native.paged import (
    FULL,
    LayerShape,
    PagedCache,
    Sight,
    StepInput,
    dense_rows,
)
from tandem.errors import EngineError

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PROGRAMS_PER_PROCESSOR = 4  # these programs run at the same time, so that their loads overlap
_LEAST_COLUMNS = 256  # the minimum per split; a smaller split costs more than it saves
_MAX_SPLITS = 64


class TritonAttention:
    """Attention with Triton kernels (see `Attention`).

    Products of bfloat16 and float16 are summed in float32. A float32 product is computed as three TF32
    products, with an error of about 1e-6.

    Args:
        cache: A cache on a CUDA device, or on any device under Triton's interpreter.
        splits: The number of programs among which a sequence's columns are divided in decode steps, a power
            of two. None derives the number from the shapes. With 1, the order in which a sequence's values
            are summed does not depend on the other sequences.

    Raises:
        EngineError: There is no kernel for the cache's dtype, such as float64.
    """

    def __init__(self, cache: PagedCache, splits: int | None = None) -> None:
        if cache.dtype not in _DTYPES:
            raise EngineError(
                "the Triton attention has no kernel for this dtype",
                field="attention",
                got=str(cache.dtype).removeprefix("torch."),
                expected="bfloat16, float16 or float32",
                remedy="create the engine with attention=torch or attention=auto",
            )
        self.cache = cache
        self._splits = splits
        self._processors = 1
        if cache.device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(cache.device).multi_processor_count

    def write(self, layer: int, step: StepInput, keys_THD: Tensor, values_THD: Tensor) -> None:
        keys_THD, values_THD = dense_rows(keys_THD), dense_rows(values_THD)
        slots_T = step.slots_GT[self.cache.group[layer]]
        write_kernel[(len(slots_T),)](
            *(self.cache.keys[layer], self.cache.values[layer], keys_THD, values_THD, slots_T),
            *(*keys_THD.stride()[:2], *values_THD.stride()[:2]),
            **_shape(self.cache.layers[layer]),
            H_PAD=next_power_of_2(self.cache.layers[layer].kv_heads),
            BLOCK=self.cache.block_size,
        )

    def attend(self, layer: int, step: StepInput, query_TND: Tensor, sight: Sight = FULL) -> Tensor:
        shape, keys, values = self.cache.layers[layer], self.cache.keys[layer], self.cache.values[layer]
        query_TND = dense_rows(query_TND.to(self.cache.dtype))
        tokens, heads, _ = query_TND.shape
        tables_SB, sequences = step.tables_GSB[self.cache.group[layer]], len(step.lengths_S)
        decode = step.max_query == 1
        group = heads // shape.kv_heads
        tiles, sizes = Tiles.of(shape, group, self.cache.dtype, decode), _shape(shape)
        splits = 1
        if decode:
            columns = tables_SB.shape[1] * self.cache.block_size
            splits = self._splits or split_count(sequences * shape.kv_heads, columns, self._processors)
        out_TNE = query_TND.new_empty(tokens, heads, shape.value_dim)
        parts = totals = peaks = out_TNE
        if splits > 1:
            parts = out_TNE.new_empty(tokens, heads, splits, shape.value_dim, dtype=torch.float32)
            totals, peaks = out_TNE.new_empty(2, tokens, heads, splits, dtype=torch.float32)
        chunks = sequences if decode else tokens // (tiles.rows // group) + sequences
        sinks_N = totals if sight.sinks_N is None else sight.sinks_N.contiguous()
        attend_kernel[(chunks, shape.kv_heads, splits)](
            *(parts, totals, peaks, query_TND, keys, values, sinks_N),
            *(tables_SB, step.starts_S1, step.lengths_S),
            *(sequences, tables_SB.stride(0), *query_TND.stride()[:2]),
            DECODE=decode,
            SPLITS=splits,
            LEAST_TILES=_LEAST_COLUMNS // tiles.columns,
            WINDOW=sight.window,
            CHUNK=sight.chunk,
            SOFTCAP=sight.softcap,
            SINKS=sight.sinks_N is not None,
            GROUP=group,
            ROWS=tiles.rows,
            **sizes,
            BLOCK=self.cache.block_size,
            TILE=tiles.columns,
            RUN=gcd(self.cache.block_size, tiles.columns),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        if splits > 1:
            widths = {name: sizes[name] for name in ("E", "E_PAD")}
            combine_kernel[(tokens * heads,)](out_TNE, parts, totals, peaks, SPLITS=splits, **widths)
        return out_TNE


@dataclass(frozen=True, slots=True)
class Tiles:
    """The numbers of query rows and columns in one tile, and the kernel's compile options."""

    rows: int
    columns: int
    warps: int
    stages: int

    @classmethod
    def of(cls, shape: LayerShape, group: int, dtype: torch.dtype, decode: bool) -> Tiles:
        """Return tile sizes that fit into registers and shared memory.

        For 16-bit dtypes, tiles use at most 99 KB of shared memory, so that consumer GPUs can also run the
        kernel. Tensor cores need at least 16 rows. From 64 rows on, Triton 3.6 and 3.7 use Hopper's
        warp-group matrix products. For tiles that are 32 elements wide, these products read beyond the tile
        (https://github.com/triton-lang/triton/issues/11366). So such tiles have 32 rows.
        """
        widest = max(shape.key_dim, shape.value_dim)
        large, small = widest > 128, widest <= 32
        single = dtype == torch.float32
        least = max(16, next_power_of_2(group))
        if decode:
            return cls(least, 32 if large or single else 64, warps=4, stages=2 if large or single else 3)
        columns = 64 >> (large + single)
        if large or small or single:
            return cls(max(32, least), columns, 8 if large and single else 4, stages=2)
        return cls(max(128, least), columns, warps=8, stages=3)


def split_count(programs: int, columns: int, processors: int) -> int:
    """Return the number of splits of each sequence's columns, a power of two.

    `programs` times the number of splits should occupy all processors, but no split should be too short.

    Args:
        programs: The number of sequences × key heads.
        columns: The number of columns of the widest block table.
        processors: The device's number of processors.
    """
    wanted = -(-processors * _PROGRAMS_PER_PROCESSOR // programs)
    most = min(wanted, columns // _LEAST_COLUMNS, _MAX_SPLITS)
    return 1 << max(0, most.bit_length() - 1)


def _shape(shape: LayerShape) -> dict[str, Any]:
    return {
        "H": shape.kv_heads,
        "D": shape.key_dim,
        "D_PAD": max(16, next_power_of_2(shape.key_dim)),
        "E": shape.value_dim,
        "E_PAD": max(16, next_power_of_2(shape.value_dim)),
    }
