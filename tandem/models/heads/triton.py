"""The tiled head in Triton, for CUDA devices: logits stay in registers and are never written to memory.

The forward pass writes three numbers per position and span of the vocabulary. The backward pass writes the
gradient with respect to the logits, one tile at a time, in the type of the hidden states. cuBLAS then
computes the two matrix products with this gradient. The kernels use no atomics, so results are the same bit
for bit in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from tandem.models.heads.tiled import Inputs, LogitGradient, Sums, TorchTiles, tile_width, tiled_log_probs
from tandem.models.heads.triton_kernels import gradient_kernel, sums_kernel

# Vocabulary entries per program of the forward pass, at least one block. For a thousand positions and 152k
# entries this results in 600 programs.
_SPAN = 2048


def token_log_probs(hidden_MD: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies; see `Head`.

    Triton has no fast matrix product in float64, so PyTorch's head is used for float64.
    """
    tiles = TorchTiles() if hidden_MD.dtype == torch.float64 else TritonTiles()
    return tiled_log_probs(tiles, hidden_MD, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The block sizes of a kernel; see `triton_kernels`."""

    rows: int
    columns: int
    features: int
    warps: int
    stages: int = 3
    together: int = 16

    @classmethod
    def of(cls, dtype: torch.dtype, device: torch.device) -> Blocks:
        """Return the block sizes for a device and the dtype of the hidden states; see `for_capability`."""
        major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
        return cls.for_capability(dtype, major)

    @classmethod
    def for_capability(cls, dtype: torch.dtype, major: int) -> Blocks:
        """Return the block sizes for a major compute capability and the dtype of the hidden states.

        16-bit types use tensor cores. fp32 does not, because its products follow IEEE 754. On Hopper (major
        capability 9), one instruction of four warps multiplies 64 rows by up to 256 columns. With eight warps
        and a block of 256 columns, each thread keeps 128 sums in registers. Such a block reads a quarter less
        per operation than a block of 128 columns. It needs 192 KiB of shared memory, which smaller devices do
        not have.
        """
        if dtype == torch.float32:
            return cls(64, 64, 32, warps=8)
        return cls(128, 256, 64, warps=8, stages=4) if major == 9 else cls(128, 128, 64, warps=8)

    @property
    def constants(self) -> dict[str, int]:
        """The compile-time constants of a kernel."""
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "FEATURES": self.features,
            "TOGETHER": self.together,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


class TritonTiles:
    """`Tiles` implemented in Triton, for bfloat16, float16 and float32. It never keeps logits."""

    def sums(self, inputs: Inputs, with_moment: bool, *, keep: bool) -> Sums:
        hidden_MD, weight_VD, targets_M, temperature, softcap = inputs
        hidden_MD, weight_VD = _rows_contiguous(hidden_MD), _rows_contiguous(weight_VD)
        rows, vocabulary = len(hidden_MD), len(weight_VD)
        blocks = Blocks.of(hidden_MD.dtype, hidden_MD.device)
        span = max(_SPAN, blocks.columns)
        spans = triton.cdiv(vocabulary, span)
        sums_SM = hidden_MD.new_empty(3 if with_moment else 2, spans, rows, dtype=torch.float32)
        target_M = hidden_MD.new_empty(rows, dtype=torch.float32)
        outputs = sums_SM[0], sums_SM[1], sums_SM[-1], target_M
        tensors = hidden_MD, weight_VD, targets_M.contiguous()
        numbers = rows, vocabulary, hidden_MD.stride(0), weight_VD.stride(0), 1 / temperature, softcap
        constants = {"MOMENT": with_moment, "CAPPED": softcap > 0, "SPAN": span, "WIDTH": hidden_MD.shape[1]}
        programs = triton.cdiv(rows, blocks.rows) * spans
        sums_kernel[(programs,)](*outputs, *tensors, *numbers, **constants, **blocks.constants)
        return Sums(sums_SM[0], sums_SM[1], sums_SM[2] if with_moment else None, target_M)

    def width(self, hidden_MD: Tensor) -> int:
        return tile_width(hidden_MD, hidden_MD.dtype)

    def gradient(self, tile: Inputs, wanted: LogitGradient, kept_MT: Tensor | None) -> Tensor:
        hidden_MD, weight_TD, targets_M, temperature, softcap = tile
        hidden_MD, weight_TD = _rows_contiguous(hidden_MD), _rows_contiguous(weight_TD)
        (rows, width), columns = hidden_MD.shape, len(weight_TD)
        blocks = Blocks.of(hidden_MD.dtype, hidden_MD.device)
        grad_MT = hidden_MD.new_empty(rows, columns)
        slope_M = wanted.constant_M if wanted.slope_M is None else wanted.slope_M
        factors = wanted.peak_M, wanted.log_total_M, wanted.constant_M, slope_M, wanted.target_M
        strides = hidden_MD.stride(0), weight_TD.stride(0), grad_MT.stride(0)
        constants = {"SLOPE": wanted.slope_M is not None, "CAPPED": softcap > 0, "WIDTH": width}
        numbers = rows, columns, *strides, 1 / temperature, softcap
        programs = triton.cdiv(rows, blocks.rows) * triton.cdiv(columns, blocks.columns)
        tensors = grad_MT, hidden_MD, weight_TD, targets_M, *factors
        gradient_kernel[(programs,)](*tensors, *numbers, **constants, **blocks.constants)
        return grad_MT


def _rows_contiguous(values: Tensor) -> Tensor:
    return values if values.stride(1) == 1 else values.contiguous()
