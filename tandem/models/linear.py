"""Matrix products of linear layers, computed with oneDNN where oneDNN is faster.

On a CPU, PyTorch computes fp32 products with MKL, which uses slow kernels on AMD processors. On one core of
an EPYC (Zen 5), MKL reached 101 GFLOP/s and oneDNN reached 230 GFLOP/s, both in IEEE fp32. PyTorch has
oneDNN's product only as an operator without a gradient. This module adds the gradient. PyTorch already
computes bf16 products with oneDNN.

On Intel processors MKL is faster, mainly for gradients, because oneDNN copies transposed factors. An update
of 3.2M parameters in fp32 took 1.1 times as long with oneDNN on one core of a Xeon (Cascade Lake).
"""

from __future__ import annotations

import platform
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ONEDNN = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
# With fewer rows MKL is faster.
_MIN_ROWS = 8
_PROCESSOR = Path("/proc/cpuinfo")
_INTEL = (
    torch._C.has_mkl
    and _PROCESSOR.is_file()
    and "GenuineIntel" in _PROCESSOR.read_text(encoding="utf-8").partition("\n\n")[0]
)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return inputs weightᵀ + bias, with gradients.

    Args:
        inputs: (..., K).
        weight: (N, K).
        bias: (N) or None.
    """
    if not _fast(inputs):
        # If the weight needs no gradient, PyTorch uses another method for a strided batch, with slightly
        # different results. A contiguous batch avoids this.
        return F.linear(inputs.contiguous(), weight, bias)
    if not torch.is_grad_enabled():
        return _product(inputs, weight, bias)
    return _Linear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call, no-any-return]


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left rightᵀ without gradient, from (M, K) and (N, K) to (M, N).

    Either factor may be a transposed view.
    """
    return _product(left, right, None) if _fast(left) else left @ right.T


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left rightᵀ in fp32, or in fp64 for fp64 factors; see `product`.

    On a CUDA device, the result of half-precision factors is never rounded to half precision. A CPU has no
    such kernel, so there the result is rounded.
    """
    out_type = torch.promote_types(left.dtype, torch.float32)
    if left.is_cuda and left.dtype != out_type:
        wide: Tensor = torch.mm(left, right.T, out_dtype=out_type)
        return wide
    return product(left, right).to(out_type)


def can_pack(weight: Tensor) -> bool:
    """Return whether `pack` supports this weight.

    `pack` supports float32 on x86, and bf16 if the processor has bf16 instructions.
    """
    return (
        _ONEDNN
        and platform.machine() in ("x86_64", "AMD64")
        and weight.device.type == "cpu"
        and (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _bf16_products()))
    )


def pack(weight: Tensor) -> Tensor:
    """Return a copy of a weight (N, K) in the layout of oneDNN's kernels, for `packed_linear`.

    Without packing, products of few rows spend most of their time on converting the weight to this layout.
    Measured with a bf16 weight (4608, 768) on one core of an EPYC (Zen 5): 8 rows took 301 us with a plain
    weight and 170 us with a packed weight. 64 rows took 1,410 us and 1,080 us.
    """
    out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return out


def packed_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return inputs weightᵀ + bias for a weight from `pack`, without gradient: (M, K) to (M, N)."""
    return _onednn(inputs, weight, bias)


def speed_up_linears(model: nn.Module) -> None:
    """Make every nn.Linear of the model use `linear`, in place.

    Parameters and types stay the same.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(self: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, self.weight, self.bias)


def _fast(inputs: Tensor) -> bool:
    return (
        _ONEDNN
        and not _INTEL
        and inputs.dtype == torch.float32
        and inputs.device.type == "cpu"
        and inputs.numel() >= _MIN_ROWS * inputs.shape[-1] > 0
    )


def _bf16_products() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch.compiler.is_compiling():
        compiled: Tensor = torch.ops.tandem.onednn_linear(inputs, weight, bias)
        return compiled
    return _onednn(inputs, weight, bias)


def _onednn(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(inputs, weight, bias, "none", [], "")
    return out


def _shape(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return inputs.new_empty(*inputs.shape[:-1], weight.shape[0])


# torch.compile supports PyTorch's operator only with constant weights, so this operator wraps it.
_LIBRARY: Any = torch.library.Library("tandem", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("onednn_linear(Tensor inputs, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.impl("onednn_linear", _onednn, "CPU")
torch.library.register_fake("tandem::onednn_linear", _shape, lib=_LIBRARY)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _product(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        grad_MN = grads[0].flatten(0, -2)
        need_inputs, need_weight, need_bias = ctx.needs_input_grad
        return (
            _product(grad_MN, weight.T, None).view_as(inputs) if need_inputs else None,
            _weight_gradient(grad_MN, inputs.flatten(0, -2)) if need_weight else None,
            grad_MN.sum(0) if need_bias else None,
        )


def _weight_gradient(grad_MN: Tensor, inputs_MK: Tensor) -> Tensor:
    """Return the weight's gradient, gradᵀ inputs.

    oneDNN copies a transposed left factor. So the narrower of the two is used as the left factor.
    """
    if grad_MN.shape[1] <= inputs_MK.shape[1]:
        return _product(grad_MN.T, inputs_MK.T, None)
    return _product(inputs_MK.T, grad_MN.T, None).T
