"""`Ops` by the kernels of `kernels.cpp`, on a CPU. Shape suffixes as in `base`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from tandem.engines.rollout.native.ops.base import Heads, Rotated


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
