"""What a decoder layer of the Llama family does beside its products and attention: in PyTorch on any
device, and by the kernels of `kernels.cpp` on a CPU. Both round where transformers' modules round.

Shape suffixes as in `paged`, and: R rows, at least the step's tokens (what is beyond these fills up a
product's shape), E hidden size, I intermediate size, M rotated heads (query then key), P positions.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engines.rollout.native.kernels import load_kernels

Rotated = tuple[Tensor, Tensor, Tensor]
"""Queries (R, N, D), rotated and scaled; keys (R, H, D), rotated; values (R, H, D)."""


@dataclass(frozen=True, slots=True)
class Heads:
    """How the rows of one joined query, key and value projection are read.

    Attributes:
        cos_PD, sin_PD: rotary tables by position.
        scale: of the queries, applied after rotation.
    """

    heads: int
    kv_heads: int
    head_dim: int
    cos_PD: Tensor
    sin_PD: Tensor
    scale: float


class Ops(Protocol):
    """Methods may write to their first argument."""

    def norm(self, x_RE: Tensor, weight_E: Tensor) -> Tensor:
        """RMS norm: computed in float32, rounded, then multiplied by the weight."""
        ...

    def added_norm(self, x_RE: Tensor, added_RE: Tensor, weight_E: Tensor) -> tuple[Tensor, Tensor]:
        """x + added, and its norm."""
        ...

    def rotate(self, qkv: Tensor, positions_T: Tensor, norm_MD: Tensor | None) -> Rotated:
        """From (R, (N + 2H) D); with `norm_MD`, each head goes through an RMS norm first (Qwen3)."""
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, from (R, 2I) to (R, I)."""
        ...


def make_ops(heads: Heads, eps: float) -> Ops:
    """The fastest implementation for the device and dtype of the rotary tables, which are the model's."""
    device, dtype = heads.cos_PD.device, heads.cos_PD.dtype
    if device.type == "cuda" and dtype != torch.float64 and find_spec("triton"):
        made: Ops = import_module("tandem.engines.rollout.native.ops_triton").TritonOps(heads, eps)
        return made
    kernels = load_kernels(dtype) if device.type == "cpu" else None
    return TorchOps(heads, eps) if kernels is None else CPUOps(heads, eps, kernels)


class TorchOps:
    """See `Ops`."""

    def __init__(self, heads: Heads, eps: float) -> None:
        self._heads = heads
        self._eps = eps
        # With this half negated, a rotation is x * cos + roll(x) * sin.
        half = heads.head_dim // 2
        self._sin_PD = torch.cat((-heads.sin_PD[:, :half], heads.sin_PD[:, half:]), -1)

    def norm(self, x_RE: Tensor, weight_E: Tensor) -> Tensor:
        return F.rms_norm(x_RE.float(), x_RE.shape[-1:], None, self._eps).to(x_RE.dtype) * weight_E

    def added_norm(self, x_RE: Tensor, added_RE: Tensor, weight_E: Tensor) -> tuple[Tensor, Tensor]:
        x_RE = x_RE + added_RE
        return x_RE, self.norm(x_RE, weight_E)

    def rotate(self, qkv: Tensor, positions_T: Tensor, norm_MD: Tensor | None) -> Rotated:
        heads = self._heads
        rotated = heads.heads + heads.kv_heads
        qkv_RXD = qkv.view(len(qkv), rotated + heads.kv_heads, heads.head_dim)
        qk_RMD = qkv_RXD[:, :rotated]
        if norm_MD is not None:
            qk_RMD = self.norm(qk_RMD, norm_MD)
        positions_R = F.pad(positions_T, (0, len(qkv) - len(positions_T)))
        cos_R1D, sin_R1D = heads.cos_PD[positions_R, None], self._sin_PD[positions_R, None]
        qk_RMD = qk_RMD * cos_R1D + qk_RMD.roll(heads.head_dim // 2, -1) * sin_R1D
        return qk_RMD[:, : heads.heads] * heads.scale, qk_RMD[:, heads.heads :], qkv_RXD[:, rotated:]

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)


class CPUOps:
    """See `Ops`. All tensors are contiguous; queries come out in float32, so that their scaling rounds
    nothing."""

    def __init__(self, heads: Heads, eps: float, kernels: ctypes.CDLL) -> None:
        self._heads = heads
        self._eps = eps
        self._kernels = kernels
        self._cos_PD, self._sin_PD = heads.cos_PD.contiguous(), heads.sin_PD.contiguous()

    def norm(self, x_RE: Tensor, weight_E: Tensor) -> Tensor:
        return self._norm(x_RE, None, weight_E)

    def added_norm(self, x_RE: Tensor, added_RE: Tensor, weight_E: Tensor) -> tuple[Tensor, Tensor]:
        return x_RE, self._norm(x_RE, added_RE, weight_E)

    def _norm(self, x_RE: Tensor, added_RE: Tensor | None, weight_E: Tensor) -> Tensor:
        out_RE = torch.empty_like(x_RE)
        self._kernels.norm(
            out_RE.data_ptr(),
            x_RE.data_ptr(),
            None if added_RE is None else added_RE.data_ptr(),
            weight_E.data_ptr(),
            *x_RE.shape,
            self._eps,
            torch.get_num_threads(),
        )
        return out_RE

    def rotate(self, qkv: Tensor, positions_T: Tensor, norm_MD: Tensor | None) -> Rotated:
        heads, rows = self._heads, qkv.shape[0]
        query_RND = torch.empty(rows, heads.heads, heads.head_dim)
        self._kernels.rotate(
            query_RND.data_ptr(),
            qkv.data_ptr(),
            self._cos_PD.data_ptr(),
            self._sin_PD.data_ptr(),
            positions_T.data_ptr(),
            None if norm_MD is None else norm_MD.data_ptr(),
            self._eps,
            heads.scale,
            positions_T.shape[0],
            heads.heads,
            heads.kv_heads,
            heads.head_dim,
            torch.get_num_threads(),
        )
        rotated = heads.heads + heads.kv_heads
        qkv_RXD = qkv.view(rows, rotated + heads.kv_heads, heads.head_dim)
        return query_RND, qkv_RXD[:, heads.heads : rotated], qkv_RXD[:, rotated:]

    def gate(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out_RI = gate_up.new_empty(rows, width)
        self._kernels.gate(out_RI.data_ptr(), gate_up.data_ptr(), rows, width, torch.get_num_threads())
        return out_RI
