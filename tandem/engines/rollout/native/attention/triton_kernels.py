"""The Triton kernels of `TritonAttention`.

The kernels compute an online softmax (Milakov, Gimelshein 2018; FlashAttention-2) over paged keys and values,
with splits as in FlashDecoding.

The rows of a tile are the query heads of one key head, for one token or for several adjacent tokens. So a key
is read once for all these rows. Scores are in units of log 2, so that exponentials are computed with exp2.
Each pointer is named after its tensor. Capital letters are compile-time constants as in `paged`: D is
key_dim, E is value_dim, H is the number of key heads, and D_PAD, E_PAD and H_PAD are the next powers of two.
Further constants:

- GROUP: query heads per key head
- ROWS: query rows of a tile
- TILE: columns of a tile
- BLOCK: tokens per cache block
- RUN: adjacent columns that are contiguous in memory
- SPLITS: programs among which a sequence's columns are divided
- DECODE: whether each sequence has one token
- WINDOW, CHUNK, SOFTCAP: as in `Sight`
- SINKS: whether there are sinks
"""

from __future__ import annotations

import triton
import triton.language as tl

# fmt: off
# The kernels have many parameters, so several parameters are written on one line.

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def write_kernel(
    keys: tl.tensor, values: tl.tensor, new_keys: tl.tensor, new_values: tl.tensor, slots: tl.tensor,
    key_token_stride: int, key_head_stride: int, value_token_stride: int, value_head_stride: int,
    H: tl.constexpr, H_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr,
    E_PAD: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    """Write the keys and values of all heads of one token into its slot. There is one program per token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        block, offset = slot // BLOCK, slot % BLOCK
        head = tl.arange(0, H_PAD)[:, None]
        dim = tl.arange(0, D_PAD)[None, :]
        mask = (head < H) & (dim < D)
        key = tl.load(new_keys + token * key_token_stride + head * key_head_stride + dim, mask=mask)
        tl.store(keys + ((block * H + head) * D + dim) * BLOCK + offset, key, mask=mask)
        dim = tl.arange(0, E_PAD)[None, :]
        mask = (head < H) & (dim < E)
        value = tl.load(new_values + token * value_token_stride + head * value_head_stride + dim, mask=mask)
        tl.store(values + ((block * H + head) * BLOCK + offset) * E + dim, value, mask=mask)


@triton.jit
def _first_column(position: tl.tensor, WINDOW: tl.constexpr, CHUNK: tl.constexpr) -> tl.tensor:
    """Return the first column that a query at this position sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def _begun(
    sinks: tl.tensor, head: tl.tensor, sunk: tl.tensor, ROWS: tl.constexpr, SINKS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first sums of weights and peak scores. A sink counts as a column whose value is 0."""
    total = tl.zeros((ROWS,), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    if SINKS:
        total = tl.where(sunk, 1.0, 0.0)
        peak = tl.load(sinks + head, mask=sunk, other=float("-inf")).to(tl.float32) * _LOG2_E
    return total, peak


@triton.jit
def _add_tile(
    weighted: tl.tensor, total: tl.tensor, peak: tl.tensor, query: tl.tensor, position: tl.tensor,
    keys: tl.tensor, values: tl.tensor, table: tl.tensor, lowest: int, length: int, tile: int,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, RUN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add one tile of columns to the running sums and the running peak.

    The running state consists of the weighted sums of values (ROWS, E), the sums of weights (ROWS) and the
    peak scores (ROWS). Set MASKED for a tile if some row does not attend to all of its columns. Only a MASKED
    tile may contain columns that no row sees: those before `lowest` and those from `length` on. The content
    of such columns, even NaN, is ignored.
    Loads of keys have no mask, because a mask would split each load into single elements.
    """
    column = tile * TILE + tl.arange(0, TILE)
    held = (column >= lowest) & (column < length)
    if MASKED:
        block = tl.load(table + column // BLOCK, mask=held, other=0)
    else:
        block = tl.load(table + column // BLOCK)
    block = block.to(tl.int64) * H
    offset = column % BLOCK
    dim = tl.arange(0, D_PAD)
    place = (block * (D * BLOCK) + offset)[None, :] + dim[:, None] * BLOCK
    place = tl.max_contiguous(tl.multiple_of(place, (1, RUN)), (1, RUN))
    mask = dim[:, None] < D
    key = tl.load(keys + place) if D == D_PAD else tl.load(keys + place, mask=mask, other=0.0)
    scores = tl.dot(query, key, input_precision="tf32x3")
    if SOFTCAP > 0:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
        scores = SOFTCAP - 2 * SOFTCAP / (tl.exp2(scores * (2 * _LOG2_E / SOFTCAP)) + 1)
    scores *= _LOG2_E
    if MASKED:
        seen = column[None, :] <= position[:, None]
        if WINDOW + CHUNK > 0:
            seen &= column[None, :] >= _first_column(position, WINDOW, CHUNK)[:, None]
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = new_peak
    if MASKED:  # for a row without any column so far
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    decay = tl.exp2(peak - base)
    weights = tl.exp2(scores - base[:, None])
    dim = tl.arange(0, E_PAD)
    place = (block * (BLOCK * E) + offset * E)[:, None] + dim[None, :]
    mask = dim[None, :] < E
    value = tl.load(values + place) if E == E_PAD else tl.load(values + place, mask=mask, other=0.0)
    if MASKED:
        value = tl.where(held[:, None], value, 0.0)
    weighted = tl.dot(weights.to(value.dtype), value, weighted * decay[:, None], input_precision="tf32x3")
    return weighted, total * decay + tl.sum(weights, 1), new_peak


@triton.jit
def _sequence_of(chunk: int, starts: tl.tensor, sequences: int, TOKENS: tl.constexpr) -> int:
    """Return the number of the sequence to which a chunk of up to TOKENS query tokens belongs.

    The chunks of sequence s begin at number starts[s] // TOKENS + s. With this formula, every sequence has
    enough chunks for its tokens, whatever the lengths of the other sequences are.
    """
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // TOKENS + middle <= chunk:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _tiles(
    earliest: int, length: int, split: int,
    TOKENS: tl.constexpr, SPLITS: tl.constexpr, LEAST_TILES: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
) -> tuple[int, int, int, int]:
    """Return the tile numbers of this split: begin, full_begin, full_end, end.

    The queries have the positions from `earliest` on. In each tile from begin to end, at least one query
    attends to at least one column. In each tile from full_begin to full_end, every query attends to all
    columns.
    """
    latest = tl.minimum(earliest + TOKENS, length) - 1
    begin, end = _first_column(earliest, WINDOW, CHUNK) // TILE, tl.cdiv(latest + 1, TILE)
    if SPLITS > 1:
        share = tl.maximum(tl.cdiv(end - begin, SPLITS), LEAST_TILES)
        begin += split * share
        end = tl.minimum(begin + share, end)
    full_begin = begin
    full_end = tl.maximum(tl.minimum((earliest + 1) // TILE, end), begin)
    if WINDOW + CHUNK > 0:
        first = tl.cdiv(_first_column(latest, WINDOW, CHUNK), TILE)
        full_begin = tl.minimum(tl.maximum(first, begin), full_end)
    return begin, full_begin, full_end, end


# With one split, `out` is the result (T, N, E). With several splits, `out` is float32 (T, N, SPLITS, E) and
# `combine_kernel` must then divide it by the totals (T, N, SPLITS).
@triton.jit(do_not_specialize=["sequences", "table_stride"])
def attend_kernel(
    out: tl.tensor, totals: tl.tensor, peaks: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    values: tl.tensor, sinks: tl.tensor, tables: tl.tensor, starts: tl.tensor, lengths: tl.tensor,
    sequences: int, table_stride: int, query_token_stride: int, query_head_stride: int,
    DECODE: tl.constexpr, SPLITS: tl.constexpr, LEAST_TILES: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr,
    E_PAD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr,
) -> None:
    """Compute the attention of one chunk, key head and split. The grid is (chunk, key head, split)."""
    TOKENS: tl.constexpr = 1 if DECODE else ROWS // GROUP
    chunk, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = chunk
    if not DECODE:
        sequence = _sequence_of(chunk, starts, sequences, TOKENS)
        chunk -= tl.load(starts + sequence) // TOKENS + sequence
    first = tl.load(starts + sequence)
    count, length = tl.load(starts + sequence + 1) - first, tl.load(lengths + sequence)
    begun = 0 if DECODE else chunk * TOKENS
    if begun >= count:
        return
    row = tl.arange(0, ROWS)
    token = begun + row // GROUP
    real = (row < TOKENS * GROUP) & (token < count)
    position = length - count + token
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, D_PAD)
    place = (first + token).to(tl.int64) * query_token_stride + head * query_head_stride
    mask = real[:, None] & (dim < D)[None, :]
    query = tl.load(queries + place[:, None] + dim[None, :], mask=mask, other=0.0)
    earliest = length - count + begun
    lowest = _first_column(earliest, WINDOW, CHUNK)
    begin, full_begin, full_end, end = _tiles(
        earliest, length, split, TOKENS, SPLITS, LEAST_TILES, WINDOW, CHUNK, TILE)
    weighted = tl.zeros((ROWS, E_PAD), tl.float32)
    total, peak = _begun(sinks, head, real & (row >= split * ROWS), ROWS, SINKS)  # sinks in the first split
    keys, values = keys + kv_head * (D * BLOCK), values + kv_head * (BLOCK * E)
    table = tables + sequence.to(tl.int64) * table_stride
    if WINDOW + CHUNK > 0:
        for tile in tl.range(begin, full_begin, num_stages=1):
            weighted, total, peak = _add_tile(
                weighted, total, peak, query, position, keys, values, table, lowest, length, tile,
                True, WINDOW, CHUNK, SOFTCAP, H, D, D_PAD, E, E_PAD, BLOCK, TILE, RUN)
    for tile in tl.range(full_begin, full_end):
        weighted, total, peak = _add_tile(
            weighted, total, peak, query, position, keys, values, table, lowest, length, tile,
            False, WINDOW, CHUNK, SOFTCAP, H, D, D_PAD, E, E_PAD, BLOCK, TILE, RUN)
    for tile in tl.range(full_end, end, num_stages=1):
        weighted, total, peak = _add_tile(
            weighted, total, peak, query, position, keys, values, table, lowest, length, tile,
            True, WINDOW, CHUNK, SOFTCAP, H, D, D_PAD, E, E_PAD, BLOCK, TILE, RUN)
    dim = tl.arange(0, E_PAD)
    mask = real[:, None] & (dim < E)[None, :]
    place = ((first + token).to(tl.int64) * (H * GROUP) + head) * SPLITS + split
    if SPLITS > 1:
        tl.store(totals + place, total, mask=real)
        tl.store(peaks + place, peak, mask=real)
    else:
        weighted /= tl.where(real, total, 1.0)[:, None]
    tl.store(out + place[:, None] * E + dim[None, :], weighted.to(out.dtype.element_ty), mask=mask)


@triton.jit
def combine_kernel(
    out: tl.tensor,
    parts: tl.tensor,
    totals: tl.tensor,
    peaks: tl.tensor,
    SPLITS: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
) -> None:
    """Combine the results of all splits for one token and head. There is one program per token and head.

    Each split's result is relative to the peak of its scores. So the results are first rescaled to the
    highest peak. A split without columns has peak -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    part = row * SPLITS + tl.arange(0, SPLITS)
    dim = tl.arange(0, E_PAD)
    peak = tl.load(peaks + part)
    scale = tl.exp2(peak - tl.max(peak, 0))
    total = tl.sum(tl.load(totals + part) * scale, 0)
    weighted = tl.load(parts + part[:, None] * E + dim[None, :], mask=(dim < E)[None, :], other=0.0)
    summed = tl.sum(weighted * scale[:, None], 0) / total
    tl.store(out + row * E + dim, summed.to(out.dtype.element_ty), mask=dim < E)
