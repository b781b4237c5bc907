"""`Ops` in PyTorch, on any device. The shape suffixes of `base` apply."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engines.rollout.native.ops.base import Heads, Rotated


class TorchOps:
    """Operations in PyTorch (see `Ops`)."""

    def __init__(self, heads: Heads, eps: float) -> None:
        self._heads = heads
        self._eps = eps
        # If the first half of sin is negated, a rotation is x * cos + roll(x) * sin.
        half = heads.rotated // 2
        self._sin_PD = torch.cat((-heads.sin_PD[:, :half], heads.sin_PD[:, half:]), -1)

    def norm(self, x_RE: Tensor, added_RE: Tensor | None, weight_E: Tensor) -> tuple[Tensor, Tensor]:
        x_RE = x_RE if added_RE is None else x_RE + added_RE
        return x_RE, F.rms_norm(x_RE.float(), x_RE.shape[-1:], None, self._eps).to(x_RE.dtype) * weight_E

    def rotate(self, qkv: Tensor, positions_T: Tensor, norm_MD: Tensor | None) -> Rotated:
        heads = self._heads
        rotated = heads.heads + heads.kv_heads
        qkv_RXD = qkv.view(len(qkv), rotated + heads.kv_heads, heads.head_dim)
        qk_RMD = qkv_RXD[:, :rotated]
        if norm_MD is not None:
            _, qk_RMD = self.norm(qk_RMD, None, norm_MD)
        positions_R = F.pad(positions_T, (0, len(qkv) - len(positions_T)))
        cos_R1D, sin_R1D = heads.cos_PD[positions_R, None], self._sin_PD[positions_R, None]
        turned, rest = qk_RMD[..., : heads.rotated], qk_RMD[..., heads.rotated :]
        rolled_RMD = torch.cat((turned.roll(heads.rotated // 2, -1), rest), -1)
        qk_RMD = qk_RMD * cos_R1D + rolled_RMD * sin_R1D
        return qk_RMD[:, : heads.heads] * heads.scale, qk_RMD[:, heads.heads :], qkv_RXD[:, rotated:]

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)
