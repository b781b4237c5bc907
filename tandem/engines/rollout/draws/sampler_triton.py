"""`sampler.sample` in two Triton kernels, for rows without edited logits and without truncation.

The PyTorch code converts the logits to float32, divides, takes the maximum, subtracts, exponentiates and
sums. For bfloat16 logits this moves about 19 times their bytes. The kernels here read the logits once, plus
one chunk per row. The first kernel computes each chunk's peak and the sum of its weights. The second kernel
finds the chunk, and then the token, at which the cumulative weight exceeds the uniform number times the total
weight of the row. Both kernels sum in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096


def sample_uncut(
    logits_RV: Tensor, uniforms_R: Tensor, temperature_R: Tensor, greedy_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample the same tokens as `sampler.sample`, and return the tokens and their log-probs.

    A row's result does not depend on the other rows.

    Args:
        logits_RV: bfloat16, float16 or float32. They are not changed.
        uniforms_R: float64 in [0, 1).
        temperature_R: float64. 1 for greedy rows.
        greedy_R: bool. A greedy row gets its most likely token, the first one if several are equal.

    Returns:
        Tokens (R) int64, and log-probs (R) float32 in nats, after the temperature.
    """
    assert logits_RV.dtype in (torch.bfloat16, torch.float16, torch.float32)
    rows, vocabulary = logits_RV.shape
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    chunks = triton.cdiv(vocabulary, _CHUNK)
    temperature_R = temperature_R.float()
    peaks_RC, totals_RC = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits_RV.device)
    best_RC = torch.empty(rows, chunks, dtype=torch.int32, device=logits_RV.device)
    tokens_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    log_probs_R = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    found, sizes = (peaks_RC, totals_RC, best_RC), (vocabulary, logits_RV.stride(0))
    weigh_kernel[(rows, chunks)](*found, logits_RV, temperature_R, *sizes, CHUNK=_CHUNK, num_warps=8)
    draw_kernel[(rows,)](
        *(tokens_R, log_probs_R, *found, logits_RV, uniforms_R, temperature_R, greedy_R, *sizes),
        CHUNKS=chunks,
        CHUNKS_PAD=triton.next_power_of_2(chunks),
        CHUNK=_CHUNK,
        num_warps=8,
    )
    return tokens_R, log_probs_R


@triton.jit
def _scores(logits: tl.tensor, column: tl.tensor, temperature: tl.tensor, vocabulary: int) -> tl.tensor:
    logit = tl.load(logits + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.div_rn(logit, tl.zeros_like(logit) + temperature)


@triton.jit
def weigh_kernel(
    peaks: tl.tensor,
    totals: tl.tensor,
    best: tl.tensor,
    logits: tl.tensor,
    temperatures: tl.tensor,
    vocabulary: int,
    row_stride: int,
    CHUNK: tl.constexpr,
) -> None:
    """Compute the peak and the total weight of one chunk of one row. The grid is (row, chunk).

    The kernel stores the chunk's highest score, the first token with this score, and the sum of exp(score -
    highest).
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = _scores(logits + row * row_stride, column, tl.load(temperatures + row), vocabulary)
    peak = tl.max(scores, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    place = row * tl.num_programs(1) + chunk
    tl.store(peaks + place, peak)
    tl.store(totals + place, tl.sum(tl.exp(scores - base), 0))
    first = tl.min(tl.where(scores == peak, column, vocabulary - 1), 0)
    tl.store(best + place, first)


@triton.jit
def _first_above(weights: tl.tensor, share: tl.tensor, SIZE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Find the first index whose cumulative weight exceeds `share` times the total weight.

    The function returns this index, and the fraction of the index's weight at which the target is reached. An
    index of weight zero is returned only if all weights are zero or NaN.
    """
    index = tl.arange(0, SIZE)
    ends = tl.cumsum(weights, 0)
    target = share * tl.sum(weights, 0)
    last = tl.max(tl.where(weights > 0, index, 0), 0)
    found = tl.min(tl.where((weights > 0) & (ends > target), index, last), 0)
    weight = tl.sum(tl.where(index == found, weights, 0.0), 0)
    begin = tl.sum(tl.where(index < found, weights, 0.0), 0)
    return found, tl.minimum(tl.maximum((target - begin) / weight, 0.0), 1 - 2.0**-53)


@triton.jit
def draw_kernel(
    tokens: tl.tensor,
    log_probs: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    best: tl.tensor,
    logits: tl.tensor,
    uniforms: tl.tensor,
    temperatures: tl.tensor,
    greedy: tl.tensor,
    vocabulary: int,
    row_stride: int,
    CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Sample the token of one row. There is one program per row."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    logits += row * row_stride
    chunk = tl.arange(0, CHUNKS_PAD)
    place = row * CHUNKS + chunk
    chunk_peak = tl.load(peaks + place, mask=chunk < CHUNKS, other=float("-inf"))
    chunk_total = tl.load(totals + place, mask=chunk < CHUNKS, other=0.0)
    peak = tl.max(chunk_peak, 0)
    weights = chunk_total.to(tl.float64) * tl.exp(chunk_peak - peak)
    log_total = peak + tl.log(tl.sum(weights, 0).to(tl.float32))
    if tl.load(greedy + row):
        first = tl.min(tl.where(chunk_peak == peak, chunk, CHUNKS - 1), 0)
        token = tl.load(best + row * CHUNKS + first)
    else:
        found, share = _first_above(weights, tl.load(uniforms + row), CHUNKS_PAD)
        scores = _scores(logits, found * CHUNK + tl.arange(0, CHUNK), temperature, vocabulary)
        base = tl.load(peaks + row * CHUNKS + found)
        within, share = _first_above(tl.exp(scores - base).to(tl.float64), share, CHUNK)
        token = found * CHUNK + within
    tl.store(tokens + row, token.to(tl.int64))
    score = tl.div_rn(tl.load(logits + token).to(tl.float32), temperature)
    tl.store(log_probs + row, score - log_total)
