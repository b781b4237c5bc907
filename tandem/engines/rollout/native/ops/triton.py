"""`Ops` in Triton, for CUDA devices.

In PyTorch these operations need about twenty short kernels per layer, each with its own memory traffic and
launch gap. Here they need four kernels. All kernels compute in float32 and round at the same points as
`TorchOps`. The only exception is a rotation, which is rounded once, after the scaling.

Capital letters are compile-time constants: E hidden size, I intermediate size, D head size, N query heads,
H key heads, and *_PAD the next power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engines.rollout.native.ops.base import Heads, Rotated

_GATE_TILE = 1024


@dataclass(frozen=True)
class TritonOps:
    """Operations in Triton (see `Ops`), for bfloat16, float16 and float32.

    Each row along the first dimension must be contiguous.
    """

    heads: Heads
    eps: float

    def norm(self, x_RE: Tensor, added_RE: Tensor | None, weight_E: Tensor) -> tuple[Tensor, Tensor]:
        out_RE, size = torch.empty_like(x_RE), x_RE.shape[1]
        sizes = {"E": size, "E_PAD": triton.next_power_of_2(size)}
        warps = min(16, max(1, sizes["E_PAD"] // 256))  # about eight elements per thread
        tensors = (out_RE, x_RE, x_RE if added_RE is None else added_RE, weight_E)
        is_added = added_RE is not None
        norm_kernel[(len(x_RE),)](*tensors, self.eps, ADDED=is_added, **sizes, num_warps=warps)
        return x_RE, out_RE

    def rotate(self, qkv: Tensor, positions_T: Tensor, norm_MD: Tensor | None) -> Rotated:
        heads = self.heads
        queries, keys, dim = heads.heads, heads.kv_heads, heads.head_dim
        rows = len(positions_T)
        qkv_RXD = qkv.view(len(qkv), queries + 2 * keys, dim)
        query_RND = qkv.new_empty(len(qkv), queries, dim)
        rotate_kernel[(rows, queries + keys)](
            *(query_RND, qkv_RXD, positions_T, heads.cos_PD, heads.sin_PD),
            *(qkv if norm_MD is None else norm_MD, heads.scale, self.eps),
            NORMED=norm_MD is not None,
            N=queries,
            H=keys,
            D=dim,
            ROTATED=heads.rotated,
            HALF_PAD=triton.next_power_of_2(dim // 2),
            num_warps=1,
        )
        return query_RND, qkv_RXD[:, queries:-keys], qkv_RXD[:, -keys:]

    def gate(self, gate_up: Tensor) -> Tensor:
        rows, size = len(gate_up), gate_up.shape[1] // 2
        out_RI = gate_up.new_empty(rows, size)
        gate_kernel[(rows, triton.cdiv(size, _GATE_TILE))](out_RI, gate_up, I=size, TILE=_GATE_TILE)
        return out_RI


@triton.jit
def norm_kernel(
    out: tl.tensor,
    x: tl.tensor,
    added: tl.tensor,
    weights: tl.tensor,
    eps: float,
    ADDED: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
) -> None:
    """Compute the RMS norm of a row of x. If ADDED, x is first replaced by x + added."""
    row = tl.program_id(0).to(tl.int64) * E
    column = tl.arange(0, E_PAD)
    mask = column < E
    kind = x.dtype.element_ty
    value = tl.load(x + row + column, mask=mask, other=0.0).to(tl.float32)
    if ADDED:
        value += tl.load(added + row + column, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(kind)
        tl.store(x + row + column, rounded, mask=mask)
        value = rounded.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / E + eps)
    weight = tl.load(weights + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + column, (normed.to(kind).to(tl.float32) * weight).to(kind), mask=mask)


@triton.jit
def rotate_kernel(
    queries: tl.tensor,
    qkv: tl.tensor,
    positions: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    norms: tl.tensor,
    scale: float,
    eps: float,
    NORMED: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF_PAD: tl.constexpr,
) -> None:
    """Rotate one head of one row. The grid is (row, head).

    A query is rotated, scaled and written to `queries`. A key is rotated in place. The elements behind the
    first ROTATED ones are paired among themselves, and their angles are 0.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, HALF_PAD)
    mask = pair < D // 2
    turned = pair < ROTATED // 2
    dim = tl.where(turned, pair, pair + ROTATED // 2)
    half = tl.where(turned, ROTATED // 2, (D - ROTATED) // 2)
    kind = qkv.dtype.element_ty
    source = qkv + (row * (N + 2 * H) + head) * D + dim
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        factor = tl.rsqrt(tl.sum(first * first + second * second, 0) / D + eps)
        norm = norms + head * D + dim
        first_norm = tl.load(norm, mask=mask, other=0.0).to(tl.float32)
        second_norm = tl.load(norm + half, mask=mask, other=0.0).to(tl.float32)
        first = ((first * factor).to(kind).to(tl.float32) * first_norm).to(kind).to(tl.float32)
        second = ((second * factor).to(kind).to(tl.float32) * second_norm).to(kind).to(tl.float32)
    place = tl.load(positions + row) * D + dim
    first_out = first * tl.load(cosines + place, mask=mask, other=0.0).to(tl.float32)
    first_out -= second * tl.load(sines + place, mask=mask, other=0.0).to(tl.float32)
    second_out = second * tl.load(cosines + place + half, mask=mask, other=0.0).to(tl.float32)
    second_out += first * tl.load(sines + place + half, mask=mask, other=0.0).to(tl.float32)
    if head < N:
        target = queries + (row * N + head) * D + dim
        tl.store(target, (first_out * scale).to(kind), mask=mask)
        tl.store(target + half, (second_out * scale).to(kind), mask=mask)
    else:
        tl.store(source, first_out.to(kind), mask=mask)
        tl.store(source + half, second_out.to(kind), mask=mask)


@triton.jit
def gate_kernel(out: tl.tensor, gate_up: tl.tensor, I: tl.constexpr, TILE: tl.constexpr) -> None:  # noqa: E741
    """Compute silu(gate) * up for one tile of a row. silu(gate) is rounded before the multiplication."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < I
    kind = gate_up.dtype.element_ty
    source = gate_up + row * (2 * I) + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + I, mask=mask, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + row * I + column, (silu * up).to(kind), mask=mask)
