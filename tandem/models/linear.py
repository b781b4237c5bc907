"""Matrix products of linear layers, through oneDNN where that is the faster library.

PyTorch sends fp32 products on a CPU to MKL, which takes slow kernels on AMD's processors: measured
on one core of an EPYC (Zen 5), 101 GFLOP/s against 230 by oneDNN, both IEEE fp32. PyTorch offers the
latter only as an operator without a gradient; here is the gradient. bf16 goes to oneDNN anyway.

On Intel's processors MKL is the faster one, above all for gradients, whose transposed factors oneDNN copies:
an update of 3.2M parameters in fp32 took 1.1 times as long with oneDNN on one core of a Xeon (Cascade Lake).
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
# Below this many rows MKL is faster.
_MIN_ROWS = 8
_PROCESSOR = Path("/proc/cpuinfo")
_INTEL = (
    torch._C.has_mkl
    and _PROCESSOR.is_file()
    and "GenuineIntel" in _PROCESSOR.read_text(encoding="utf-8").partition("\n\n")[0]
)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs weightᵀ + bias, with gradient.

    Args:
        inputs: (..., K).
        weight: (N, K).
        bias: (N) or None.
    """
    if not _fast(inputs):
        # PyTorch multiplies a strided batch otherwise, to other bits, where the weight takes no gradient.
        return F.linear(inputs.contiguous(), weight, bias)
    if not torch.is_grad_enabled():
        return _product(inputs, weight, bias)
    return _Linear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call, no-any-return]


def product(left: Tensor, right: Tensor) -> Tensor:
    """left rightᵀ, without gradient: (M, K), (N, K) to (M, N). Either may be a transposed view."""
    return _product(left, right, None) if _fast(left) else left @ right.T


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """`product` in fp32, of fp64 factors in fp64. On a CUDA device sums of half precision's products are not
    rounded to it on the way; a CPU has no such kernel."""
    out_type = torch.promote_types(left.dtype, torch.float32)
    if left.is_cuda and left.dtype != out_type:
        wide: Tensor = torch.mm(left, right.T, out_dtype=out_type)
        return wide
    return product(left, right).to(out_type)


def can_pack(weight: Tensor) -> bool:
    """True for a weight that `pack` takes: float32, and bf16 where the processor multiplies it, on x86."""
    return (
        _ONEDNN
        and platform.machine() in ("x86_64", "AMD64")
        and weight.device.type == "cpu"
        and (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _bf16_products()))
    )


def pack(weight: Tensor) -> Tensor:
    """A copy of a weight (N, K) in the layout that oneDNN's kernels read, for `packed_linear`.

    Products of few rows otherwise spend most of their time on bringing the weight into that layout: weight
    (4608, 768) in bf16 on one core of an EPYC (Zen 5), 8 rows in 301 us plain and 170 packed, 64 rows in
    1,410 and 1,080.
    """
    out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return out


def packed_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` with a weight from `pack`, without gradient; (M, K) to (M, N)."""
    return _product(inputs, weight, bias)


def speed_up_linears(model: nn.Module) -> None:
    """Makes every nn.Linear of the model compute through `linear`; parameters and types stay."""
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


# The compiler takes PyTorch's own operator with constant weights alone.
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
    """gradᵀ inputs. oneDNN copies a transposed left factor: the narrower of the two goes there."""
    if grad_MN.shape[1] <= inputs_MK.shape[1]:
        return _product(grad_MN.T, inputs_MK.T, None)
    return _product(inputs_MK.T, grad_MN.T, None).T
