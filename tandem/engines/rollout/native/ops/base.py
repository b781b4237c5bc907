"""The protocol of the operations of a Llama-family layer, except matrix products and attention.

Every implementation rounds at the same points as transformers' modules.

The shape suffixes of `paged` apply. Further suffixes: R rows (the step's tokens, then padding rows), E hidden
size, I intermediate size, M rotated heads (queries, then keys), P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Rotated = tuple[Tensor, Tensor, Tensor]
"""Queries (R, N, D), rotated and scaled; keys (R, H, D), rotated; values (R, H, D)."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The layout of the heads in the output of a joined query, key and value projection.

    Attributes:
        heads: The number of query heads.
        kv_heads: The number of key heads.
        head_dim: The size of a head.
        cos_PD: The cosines of the rotary angles at each position, contiguous.
        sin_PD: The sines of the rotary angles at each position, contiguous.
        scale: The factor by which queries are multiplied after the rotation.
        rotated: How many of a head's elements are rotated. At the others, cos is 1 and sin is 0.
    """

    heads: int
    kv_heads: int
    head_dim: int
    cos_PD: Tensor
    sin_PD: Tensor
    scale: float
    rotated: int


class Ops(Protocol):
    """The protocol of a layer's operations. A method may overwrite its first argument."""

    def norm(self, x_RE: Tensor, added_RE: Tensor | None, weight_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum x + added, and the RMS norm of this sum. `added_RE` = None counts as 0.

        The norm is computed in float32, rounded, then multiplied by the weight.
        """

    def rotate(self, qkv: Tensor, positions_T: Tensor, norm_MD: Tensor | None) -> Rotated:
        """Split the projection (R, (N + 2H) D) into heads and rotate queries and keys.

        With `norm_MD`, each head first goes through an RMS norm (Qwen3).
        """

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, from (R, 2I) to (R, I)."""
