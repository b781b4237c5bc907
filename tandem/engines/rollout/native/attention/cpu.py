"""Attention over the paged KV cache on a CPU, with the kernels of `kernels.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engines.rollout.native.kernels import load_kernels
from tandem.engines.rollout.native.paged import FULL, PagedCache, Sight, StepInput, dense_rows
from tandem.errors import EngineError


def why_not_cpu(cache: PagedCache) -> str | None:
    """Return the reason why `CPUAttention` does not support a cache, or None if it supports the cache."""
    if cache.device.type != "cpu":
        return f"the cache is on {cache.device}"
    kernels = load_kernels(cache.dtype)
    if kernels is None:
        return f"this machine has no kernels for {cache.dtype}"
    if cache.block_size % kernels.lanes():
        return f"the block size of {cache.block_size} tokens is not a multiple of {kernels.lanes()}"
    widest = max(layer.value_dim for layer in cache.layers)
    if widest > kernels.max_value_dim():
        return f"value heads have {widest} numbers, but at most {kernels.max_value_dim()} are supported"
    return None


class CPUAttention:
    """Attention on a CPU (see `Attention`).

    Queries are converted to float32. Pass float32 queries if you can, because they are not rounded.

    Raises:
        EngineError: This class does not support the cache.
    """

    def __init__(self, cache: PagedCache) -> None:
        reason, kernels = why_not_cpu(cache), load_kernels(cache.dtype)
        if reason is not None or kernels is None:
            raise EngineError(
                f"the CPU attention cannot run: {reason}",
                field="attention",
                got="cpu",
                remedy="create the engine with attention=torch or attention=auto",
            )
        self._kernels = kernels
        self.cache = cache

    def write(self, layer: int, step: StepInput, keys_THD: Tensor, values_THD: Tensor) -> None:
        assert keys_THD.dtype == values_THD.dtype == self.cache.dtype
        keys_THD, values_THD = dense_rows(keys_THD), dense_rows(values_THD)
        shape, keys, values = self.cache.layers[layer][:3], self.cache.keys[layer], self.cache.values[layer]
        slots_T = step.slots_GT[self.cache.group[layer]]
        self._kernels.write(
            *(keys_THD.data_ptr(), *keys_THD.stride()[:2], values_THD.data_ptr(), *values_THD.stride()[:2]),
            *(slots_T.data_ptr(), keys.data_ptr(), values.data_ptr()),
            *(slots_T.shape[0], *shape, self.cache.block_size, torch.get_num_threads()),
        )

    def attend(self, layer: int, step: StepInput, query_TND: Tensor, sight: Sight = FULL) -> Tensor:
        query_TND = query_TND.to(torch.float32).contiguous()
        tokens, heads, _ = query_TND.shape
        shape, keys, values = self.cache.layers[layer][:3], self.cache.keys[layer], self.cache.values[layer]
        tables_SB = step.tables_GSB[self.cache.group[layer]]
        out_TND = torch.empty(tokens, heads, shape[2], dtype=self.cache.dtype)
        sinks_N = None if sight.sinks_N is None else sight.sinks_N.to(torch.float32).contiguous()
        self._kernels.attend(
            *(out_TND.data_ptr(), query_TND.data_ptr(), keys.data_ptr(), values.data_ptr()),
            *(step.starts_S1.data_ptr(), tables_SB.data_ptr(), tables_SB.stride(0)),
            *(step.positions_T.data_ptr(), step.lengths_S.shape[0], heads, *shape, self.cache.block_size),
            *(sight.window, sight.chunk, sight.softcap, None if sinks_N is None else sinks_N.data_ptr()),
            torch.get_num_threads(),
        )
        return out_TND
