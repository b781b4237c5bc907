"""The tiled head in Triton, for CUDA devices: logits are made and used in registers, never written.

The forward pass writes three numbers per position and span of the vocabulary. The backward pass writes the
gradient in the logits, one tile at a time and in the states' own type, and leaves the two products with it
to cuBLAS; no atomics, so that a run repeats bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tandem.models.heads.tiled import LogitGradient, Sums, TorchTiles, tiled_log_probs
from tandem.models.heads.triton_kernels import gradient_kernel, sums_kernel

# Vocabulary entries per program of the forward pass: a thousand positions of 152k entries are 304 programs.
_SPAN = 4096


def token_log_probs(
    hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, *, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """See `Head`. Float64 takes PyTorch's way."""
    tiles = TorchTiles() if hidden_MD.dtype == torch.float64 else TritonTiles()
    return tiled_log_probs(tiles, hidden_MD, weight_VD, targets_M, temperature, with_entropy)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of a kernel's blocks; see `triton_kernels`."""

    rows: int
    columns: int
    features: int
    warps: int
    stages: int = 3

    @classmethod
    def of(cls, dtype: torch.dtype) -> Blocks:
        """The sizes for states of a type: two bytes go through tensor cores, four, in IEEE products, do
        not."""
        return cls(64, 64, 32, warps=8) if dtype == torch.float32 else cls(128, 128, 64, warps=8)


class TritonTiles:
    """`Tiles` in Triton, for bfloat16, float16 and float32."""

    def sums(
        self,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        targets_M: Tensor,
        temperature: float,
        with_moment: bool,
    ) -> Sums:
        hidden_MD, weight_VD = _rows_contiguous(hidden_MD), _rows_contiguous(weight_VD)
        rows, vocabulary = len(hidden_MD), len(weight_VD)
        spans, blocks = triton.cdiv(vocabulary, _SPAN), Blocks.of(hidden_MD.dtype)
        sums_SM = hidden_MD.new_empty(3 if with_moment else 2, spans, rows, dtype=torch.float32)
        target_M = hidden_MD.new_empty(rows, dtype=torch.float32)
        sums_kernel[(triton.cdiv(rows, blocks.rows), spans)](
            sums_SM[0],
            sums_SM[1],
            sums_SM[-1],
            target_M,
            hidden_MD,
            weight_VD,
            targets_M.contiguous(),
            rows,
            vocabulary,
            hidden_MD.stride(0),
            weight_VD.stride(0),
            float(temperature),
            MOMENT=with_moment,
            SPAN=_SPAN,
            WIDTH=hidden_MD.shape[1],
            ROWS=blocks.rows,
            COLUMNS=blocks.columns,
            FEATURES=blocks.features,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        return Sums(sums_SM[0], sums_SM[1], sums_SM[2] if with_moment else None, target_M)

    def gradient(
        self,
        hidden_MD: Tensor,
        weight_TD: Tensor,
        targets_M: Tensor,
        temperature: float,
        wanted: LogitGradient,
    ) -> Tensor:
        hidden_MD, weight_TD = _rows_contiguous(hidden_MD), _rows_contiguous(weight_TD)
        (rows, width), columns = hidden_MD.shape, len(weight_TD)
        blocks = Blocks.of(hidden_MD.dtype)
        grad_MT = hidden_MD.new_empty(rows, columns)
        gradient_kernel[(triton.cdiv(rows, blocks.rows), triton.cdiv(columns, blocks.columns))](
            grad_MT,
            hidden_MD,
            weight_TD,
            targets_M,
            wanted.peak_M,
            wanted.log_total_M,
            wanted.constant_M,
            wanted.constant_M if wanted.slope_M is None else wanted.slope_M,
            wanted.target_M,
            rows,
            columns,
            hidden_MD.stride(0),
            weight_TD.stride(0),
            grad_MT.stride(0),
            float(temperature),
            SLOPE=wanted.slope_M is not None,
            WIDTH=width,
            ROWS=blocks.rows,
            COLUMNS=blocks.columns,
            FEATURES=blocks.features,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        return grad_MT


def _rows_contiguous(values: Tensor) -> Tensor:
    return values if values.stride(1) == 1 else values.contiguous()
