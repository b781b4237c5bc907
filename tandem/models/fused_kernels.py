"""The Triton kernels of `fused`: norms and gates, forward and backward.

Each kernel reads its inputs once and writes its outputs once. All kernels compute in float32 and round at the
same points as the forward pass of transformers' modules. Capital letters are compile-time constants: E
features per row, E_PAD the next power of two, ROWS rows per block, TILE elements per block.
"""

from __future__ import annotations

import triton
import triton.language as tl

# fmt: off
# The kernels have many parameters, so several are written on one line. `rows` differs in every
# micro-batch, so a new value must not cause another compilation.


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    out: tl.tensor, factors: tl.tensor, x: tl.tensor, weights: tl.tensor, rows: int, eps: float,
    E: tl.constexpr, E_PAD: tl.constexpr, ROWS: tl.constexpr,
) -> None:
    """Compute the RMS norm of a block of rows, and the scale factor of each row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, E_PAD)
    place = row.to(tl.int64)[:, None] * E + column[None, :]
    mask = (row < rows)[:, None] & (column < E)[None, :]
    kind = x.dtype.element_ty
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weights + column, mask=column < E, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 1) / E + eps)
    normed = (value * factor[:, None]).to(kind).to(tl.float32)
    tl.store(out + place, (normed * weight[None, :]).to(kind), mask=mask)
    tl.store(factors + row, factor, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def norm_gradient_kernel(
    x_gradient: tl.tensor, weight_gradients: tl.tensor, gradient: tl.tensor, x: tl.tensor,
    weights: tl.tensor, factors: tl.tensor, rows: int, WEIGHT: tl.constexpr, E: tl.constexpr,
    E_PAD: tl.constexpr, ROWS: tl.constexpr,
) -> None:
    """Compute the gradients of the RMS norm for several blocks of rows.

    If WEIGHT is set, also sum the weight's gradient over these rows.

    With n = x factor and h = gradient weight, the gradient of x is factor (h - n mean(h n)).
    """
    column = tl.arange(0, E_PAD)
    kind = x.dtype.element_ty
    weight = tl.load(weights + column, mask=column < E, other=0.0).to(tl.float32)
    weight_gradient = tl.zeros((E_PAD,), tl.float32)
    start = tl.program_id(0) * ROWS
    while start < rows:
        row = start + tl.arange(0, ROWS)
        place = row.to(tl.int64)[:, None] * E + column[None, :]
        mask = (row < rows)[:, None] & (column < E)[None, :]
        value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        slope = tl.load(gradient + place, mask=mask, other=0.0).to(tl.float32)
        factor = tl.load(factors + row, mask=row < rows, other=0.0)[:, None]
        normed = value * factor
        if WEIGHT:
            weight_gradient += tl.sum(slope * normed.to(kind).to(tl.float32), 0)
        slope *= weight[None, :]
        mean = tl.sum(slope * normed, 1) / E
        found = factor * (slope - normed * mean[:, None])
        tl.store(x_gradient + place, found.to(kind), mask=mask)
        start += tl.num_programs(0) * ROWS
    if WEIGHT:
        tl.store(weight_gradients + tl.program_id(0) * E + column, weight_gradient, mask=column < E)


@triton.jit
def gate_kernel(out: tl.tensor, gates: tl.tensor, ups: tl.tensor, size: int, TILE: tl.constexpr) -> None:
    """Compute silu(gate) * up. silu(gate) is rounded before the multiplication."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = place < size
    kind = gates.dtype.element_ty
    gate = tl.load(gates + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(ups + place, mask=mask, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + place, (silu * up).to(kind), mask=mask)


@triton.jit
def gate_gradient_kernel(
    gate_gradient: tl.tensor, up_gradient: tl.tensor, gradient: tl.tensor, gates: tl.tensor, ups: tl.tensor,
    size: int, TILE: tl.constexpr,
) -> None:
    """Compute the gradients of `gate_kernel`: silu'(g) = s (1 + g (1 - s)) for s = sigmoid(g)."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = place < size
    kind = gates.dtype.element_ty
    gate = tl.load(gates + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(ups + place, mask=mask, other=0.0).to(tl.float32)
    slope = tl.load(gradient + place, mask=mask, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    silu = (gate * share).to(kind).to(tl.float32)
    tl.store(up_gradient + place, (slope * silu).to(kind), mask=mask)
    found = slope * up * share * (1.0 + gate * (1.0 - share))
    tl.store(gate_gradient + place, found.to(kind), mask=mask)
