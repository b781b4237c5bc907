"""Attention over the paged KV cache in plain PyTorch, on any device and in any dtype.

The module gathers the blocks of the sequences into dense tensors, here called rectangles. It is the reference
implementation for the kernels, and is used where no kernel can run.

The shape suffixes of `paged` apply. Further suffixes: R sequences of a rectangle, Q query tokens per
sequence, G query heads per key head, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tandem.engines.rollout.native.paged import FULL, PagedCache, Sight, StepInput

_MAX_SCORES = 2**24  # the limit per matrix product, so that long prompts do not need gigabytes


class TorchAttention:
    """Attention in PyTorch (see `Attention`), computed in float32 or float64."""

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache

    def write(self, layer: int, step: StepInput, keys_THD: Tensor, values_THD: Tensor) -> None:
        slots_T = step.slots_GT[self.cache.group[layer]]
        real = slots_T >= 0
        slots = slots_T[real]
        block, offset = slots // self.cache.block_size, slots % self.cache.block_size
        self.cache.keys[layer][block, :, :, offset] = keys_THD[: len(real)][real]
        self.cache.values[layer][block, :, offset] = values_THD[: len(real)][real]

    def attend(self, layer: int, step: StepInput, query_TND: Tensor, sight: Sight = FULL) -> Tensor:
        tokens, heads, _ = query_TND.shape
        width, dtype = self.cache.layers[layer].value_dim, self.cache.dtype
        out_TND = query_TND.new_empty(tokens, heads, width, dtype=dtype)
        precision = torch.promote_types(dtype, torch.float32)
        blocks = -(-step.max_length // self.cache.block_size)
        for tables_RB, tokens_RQ, lengths_R in _rectangles(step, step.tables_GSB[self.cache.group[layer]]):
            tables_RB = tables_RB[:, :blocks]
            keys_RHDC = self.cache.keys[layer][tables_RB].permute(0, 2, 3, 1, 4).flatten(3).to(precision)
            values_RHCD = self.cache.values[layer][tables_RB].transpose(1, 2).flatten(2, 3).to(precision)
            # The slots that no query sees may contain NaN from other sequences, and a weight of 0 does not
            # remove NaN.
            column_C = torch.arange(keys_RHDC.shape[3], device=lengths_R.device)
            first_R = sight.first(step.positions_T[tokens_RQ[:, 0]])
            unseen_RC = (column_C < first_R[:, None]) | (column_C >= lengths_R[:, None])
            values_RHCD.masked_fill_(unseen_RC[:, None, :, None], 0.0)
            per_token = keys_RHDC.shape[3] * heads * len(tokens_RQ)
            for part_RQ in torch.split(tokens_RQ, max(1, _MAX_SCORES // per_token), dim=1):
                query, positions = query_TND[part_RQ].to(precision), step.positions_T[part_RQ]
                out_TND[part_RQ] = _attend(query, keys_RHDC, values_RHCD, positions, sight).to(dtype)
        return out_TND


def _rectangles(step: StepInput, tables_SB: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield groups of sequences that have the same number of tokens in the step.

    A group consists of block tables (R, B), token indices (R, Q) and lengths (R).
    """
    if step.max_query == 1:  # the number is known without waiting for the device
        yield tables_SB, step.starts_S1[:-1, None].long(), step.lengths_S
        return
    counts_S = step.starts_S1.diff()
    for count in sorted(set(counts_S.tolist())):
        rows = (counts_S == count).nonzero().squeeze(1)
        columns = torch.arange(count, device=rows.device)
        yield tables_SB[rows], step.starts_S1[rows, None].long() + columns, step.lengths_S[rows]


def _attend(
    query_RQND: Tensor, keys_RHDC: Tensor, values_RHCD: Tensor, positions_RQ: Tensor, sight: Sight
) -> Tensor:
    """Return the attention output of one rectangle, (R, Q, N, value_dim)."""
    sequences, queries, heads, _ = query_RQND.shape
    kv_heads, columns = keys_RHDC.shape[1], keys_RHDC.shape[3]
    group = heads // kv_heads
    # The query heads of one key head are rows of one matrix product.
    query = query_RQND.view(sequences, queries, kv_heads, group, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = (query @ keys_RHDC).view(sequences, kv_heads, group, queries, columns)
    if sight.softcap:
        scores = sight.softcap * torch.tanh(scores / sight.softcap)
    column_C = torch.arange(columns, device=positions_RQ.device)
    positions = positions_RQ[:, :, None]
    hidden = (column_C < sight.first(positions)) | (column_C > positions)
    scores.masked_fill_(hidden[:, None, None], -torch.inf)
    if sight.sinks_N is not None:
        sinks = sight.sinks_N.to(scores).view(kv_heads, group, 1, 1).expand(sequences, -1, -1, queries, 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., :columns]
    out = (weights.flatten(2, 3) @ values_RHCD).view(sequences, kv_heads, group, queries, -1)
    joined: Tensor = out.permute(0, 3, 1, 2, 4).flatten(2, 3)
    return joined
