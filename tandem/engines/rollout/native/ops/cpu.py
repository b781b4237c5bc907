"""`Ops` with the kernels of `kernels.cpp`, on a CPU. The shape suffixes of `base` apply."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engines.rollout.native.ops.base import Heads, Rotated


@dataclass(frozen=True)
class CPUOps:
    """Operations on a CPU (see `Ops`).

    All tensors are contiguous. Queries are returned in float32, so that scaling them needs no rounding.
    """

    heads: Heads
    eps: float
    kernels: ctypes.CDLL

    def norm(self, x_RE: Tensor, added_RE: Tensor | None, weight_E: Tensor) -> tuple[Tensor, Tensor]:
        out_RE = torch.empty_like(x_RE)
        self.kernels.norm(
            *(out_RE.data_ptr(), x_RE.data_ptr(), None if added_RE is None else added_RE.data_ptr()),
            *(weight_E.data_ptr(), *x_RE.shape, self.eps, torch.get_num_threads()),
        )
        return x_RE, out_RE

    def rotate(self, qkv: Tensor, positions_T: Tensor, norm_MD: Tensor | None) -> Rotated:
        heads, rows = self.heads, qkv.shape[0]
        query_RND = torch.empty(rows, heads.heads, heads.head_dim)
        self.kernels.rotate(
            *(query_RND.data_ptr(), qkv.data_ptr(), heads.cos_PD.data_ptr(), heads.sin_PD.data_ptr()),
            *(positions_T.data_ptr(), None if norm_MD is None else norm_MD.data_ptr()),
            *(self.eps, heads.scale, positions_T.shape[0], heads.heads, heads.kv_heads, heads.head_dim),
            *(heads.rotated, torch.get_num_threads()),
        )
        rotated = heads.heads + heads.kv_heads
        qkv_RXD = qkv.view(rows, rotated + heads.kv_heads, heads.head_dim)
        return query_RND, qkv_RXD[:, heads.heads : rotated], qkv_RXD[:, rotated:]

    def gate(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out_RI = gate_up.new_empty(rows, width)
        self.kernels.gate(out_RI.data_ptr(), gate_up.data_ptr(), rows, width, torch.get_num_threads())
        return out_RI
