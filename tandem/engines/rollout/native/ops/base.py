"""The protocol of the operations of a Llama-family layer other than products and attention.

Every implementation rounds where transformers' modules round.

Shape suffixes as in `paged`, and: R rows, at least the step's tokens (the rest is padding of a product's
shape), E hidden size, I intermediate size, M rotated heads (queries, then keys), P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Rotated = tuple[Tensor, Tensor, Tensor]
"""Queries (R, N, D), rotated and scaled; keys (R, H, D), rotated; values (R, H, D)."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The layout of the output of one joined query, key and value projection.

    Attributes:
        heads: The number of query heads.
        kv_heads: The number of key heads.
        head_dim: The size of a head.
        cos_PD, sin_PD: Rotary tables by position, contiguous.
        scale: The factor of the queries, applied after the rotation.
    """

    heads: int
    kv_heads: int
    head_dim: int
    cos_PD: Tensor
    sin_PD: Tensor
    scale: float


class Ops(Protocol):
    """The operations of a layer. A method may write to its first argument."""

    def norm(self, x_RE: Tensor, added_RE: Tensor | None, weight_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + added, and its RMS norm. If `added_RE` is None, x is used alone.

        The norm is computed in float32, rounded, then multiplied by the weight.
        """

    def rotate(self, qkv: Tensor, positions_T: Tensor, norm_MD: Tensor | None) -> Rotated:
        """Split the projection (R, (N + 2H) D) into heads and rotate queries and keys.

        With `norm_MD`, each head first goes through an RMS norm (Qwen3).
        """

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, from (R, 2I) to (R, I)."""
