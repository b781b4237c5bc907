"""The Triton kernels of `TritonTiles`, which fuse linear layer and softmax, so logits stay in registers.

Each pointer is named after its tensor. Capital letters are compile-time constants:

    ROWS      positions of a block COLUMNS   vocabulary entries of a block FEATURES  hidden features of one
    step of the matrix product, of WIDTH in total SPAN      vocabulary entries that one program processes,
    block by block TOGETHER  blocks of rows that consecutive programs process with the same entries of the
    vocabulary

Programs that run at the same time should read the same hidden states and weights, so that these stay in the
L2 cache. If programs were ordered by rows only, each step would read the hidden states of all positions from
memory again.
"""

from __future__ import annotations

import triton
import triton.language as tl

# fmt: off
# The kernels have many parameters, so several are written on one line. `rows` differs in every
# micro-batch, so a new value must not cause another compilation.


@triton.jit
def _place(program: int, row_blocks: int, others: int, TOGETHER: tl.constexpr) -> tuple[int, int]:
    """Return the program's block of rows, and its index among the `others` vocabulary parts."""
    each = TOGETHER * others
    first = program // each * TOGETHER
    together = min(row_blocks - first, TOGETHER)
    return first + program % each % together, program % each // together


@triton.jit
def _logits(
    hidden: tl.tensor, weight: tl.tensor, row: tl.tensor, column: tl.tensor, rows: int, vocabulary: int,
    hidden_stride: int, weight_stride: int, scale: float, softcap: float, CAPPED: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FEATURES: tl.constexpr,
) -> tl.tensor:
    """Return the logits, (ROWS, COLUMNS) in fp32; zero beyond the last row and the last column.

    They are hidden weightᵀ scale, or softcap tanh(hidden weightᵀ scale / softcap) if CAPPED.
    """
    feature = tl.arange(0, FEATURES)
    hidden += row.to(tl.int64)[:, None] * hidden_stride + feature[None, :]
    weight += column.to(tl.int64)[None, :] * weight_stride + feature[:, None]
    logits = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, WIDTH, FEATURES):
        states_mask = (row < rows)[:, None]
        weights_mask = (column < vocabulary)[None, :]
        if WIDTH % FEATURES:
            states_mask &= (feature < WIDTH - start)[None, :]
            weights_mask &= (feature < WIDTH - start)[:, None]
        states = tl.load(hidden + start, mask=states_mask, other=0.0)
        weights = tl.load(weight + start, mask=weights_mask, other=0.0)
        logits = tl.dot(states, weights, logits, input_precision="ieee")
    logits *= scale
    if CAPPED:  # tanh(x) = 1 - 2 / (exp(2x) + 1)
        logits = softcap - 2 * softcap / (tl.exp(logits * (2 / softcap)) + 1)
    return logits


@triton.jit(do_not_specialize=["rows", "peaks", "totals", "moments"])
def sums_kernel(
    peaks: tl.tensor, totals: tl.tensor, moments: tl.tensor, target_logits: tl.tensor, hidden: tl.tensor,
    weight: tl.tensor, targets: tl.tensor, rows: int, vocabulary: int, hidden_stride: int,
    weight_stride: int, scale: float, softcap: float, MOMENT: tl.constexpr, CAPPED: tl.constexpr,
    SPAN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr, TOGETHER: tl.constexpr,
) -> None:
    """Compute the fields of `Sums` for one block of rows and one span. There is one program per pair.

    The kernel computes an online softmax (Milakov, Gimelshein 2018).
    """
    block, span = _place(tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(vocabulary, SPAN), TOGETHER)
    row = block * ROWS + tl.arange(0, ROWS)
    target = tl.load(targets + row, mask=row < rows, other=-1)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    found = tl.zeros((ROWS,), tl.float32)
    for start in range(0, SPAN, COLUMNS):
        column = span * SPAN + start + tl.arange(0, COLUMNS)
        logits = _logits(
            hidden, weight, row, column, rows, vocabulary, hidden_stride, weight_stride, scale, softcap,
            CAPPED, WIDTH, ROWS, COLUMNS, FEATURES,
        )
        found += tl.sum(tl.where(column[None, :] == target[:, None], logits, 0.0), 1)
        # Entries beyond the vocabulary get zero weight and zero moment. -inf would give NaN, as -inf * 0.
        logits = tl.where((column < vocabulary)[None, :], logits, -1e30)
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        shifted = logits - new_peak[:, None]
        weights = tl.exp(shifted)
        shift = tl.where(total > 0, peak - new_peak, 0.0)  # before the first block there is no peak
        decay = tl.exp(shift)
        if MOMENT:
            moment = (moment + shift * total) * decay + tl.sum(weights * shifted, 1)
        total = total * decay + tl.sum(weights, 1)
        peak = new_peak
    place = span.to(tl.int64) * rows + row
    tl.store(peaks + place, peak, mask=row < rows)
    tl.store(totals + place, total, mask=row < rows)
    if MOMENT:
        tl.store(moments + place, moment, mask=row < rows)
    mine = (row < rows) & (target // SPAN == span)
    tl.store(target_logits + row, found, mask=mine)


@triton.jit(do_not_specialize=["rows"])
def gradient_kernel(
    gradient: tl.tensor, hidden: tl.tensor, weight: tl.tensor, targets: tl.tensor, peaks: tl.tensor,
    log_totals: tl.tensor, constants: tl.tensor, slopes: tl.tensor, target_gradients: tl.tensor, rows: int,
    vocabulary: int, hidden_stride: int, weight_stride: int, gradient_stride: int, scale: float,
    softcap: float, SLOPE: tl.constexpr, CAPPED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, FEATURES: tl.constexpr, TOGETHER: tl.constexpr,
) -> None:
    """Compute `Tiles.gradient` for one block of rows and one block of columns; see `LogitGradient`."""
    block, part = _place(tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(vocabulary, COLUMNS), TOGETHER)
    row = block * ROWS + tl.arange(0, ROWS)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    logits = _logits(
        hidden, weight, row, column, rows, vocabulary, hidden_stride, weight_stride, scale, softcap, CAPPED,
        WIDTH, ROWS, COLUMNS, FEATURES,
    )
    real = row < rows
    peak = tl.load(peaks + row, mask=real, other=0.0)
    log_total = tl.load(log_totals + row, mask=real, other=0.0)
    constant = tl.load(constants + row, mask=real, other=0.0)
    log_p = logits - peak[:, None] - log_total[:, None]
    factor = tl.zeros_like(log_p) + constant[:, None]
    if SLOPE:
        factor += tl.load(slopes + row, mask=real, other=0.0)[:, None] * log_p
    target = tl.load(targets + row, mask=real, other=-1)
    at_target = tl.load(target_gradients + row, mask=real, other=0.0)
    value = tl.exp(log_p) * factor + tl.where(column[None, :] == target[:, None], at_target[:, None], 0.0)
    if CAPPED:
        value *= 1 - (logits / softcap) * (logits / softcap)
    place = gradient + row.to(tl.int64)[:, None] * gradient_stride + column[None, :]
    mask = real[:, None] & (column < vocabulary)[None, :]
    tl.store(place, value.to(gradient.dtype.element_ty), mask=mask)
