"""The protocol of what a decoder layer of the Llama family does beside its products and attention. Every
implementation rounds where transformers' modules round.

Shape suffixes as in `paged`, and: R rows, at least the step's tokens (what is beyond these fills up a
product's shape), E hidden size, I intermediate size, M rotated heads (query then key), P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Rotated = tuple[Tensor, Tensor, Tensor]
"""Queries (R, N, D), rotated and scaled; keys (R, H, D), rotated; values (R, H, D)."""


@dataclass(frozen=True, slots=True)
class Heads:
    """How the rows of one joined query, key and value projection are read.

    Attributes:
        cos_PD, sin_PD: rotary tables by position, contiguous.
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

    def norm(self, x_RE: Tensor, added_RE: Tensor | None, weight_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + added, or x where nothing is added, and its RMS norm: computed in float32, rounded, then
        multiplied by the weight."""

    def rotate(self, qkv: Tensor, positions_T: Tensor, norm_MD: Tensor | None) -> Rotated:
        """From (R, (N + 2H) D); with `norm_MD`, each head goes through an RMS norm first (Qwen3)."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, from (R, 2I) to (R, I)."""
