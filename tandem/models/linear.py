"""Matrix products of linear layers, through oneDNN where that is the faster library.

PyTorch sends fp32 products on a CPU to MKL, which does not use AVX-512 on AMD processors: measured
on one core of an EPYC (Zen 5), 101 GFLOP/s against 230 by oneDNN, both IEEE fp32. PyTorch offers the
latter only as an operator without a gradient; here is the gradient. bf16 goes to oneDNN anyway.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_CPU: Any = torch.backends
_ONEDNN = _CPU.mkldnn.is_available() and _CPU.cpu.get_cpu_capability() == "AVX512"
# Below this many rows MKL is faster.
_MIN_ROWS = 8


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs weightᵀ + bias, with gradient.

    Args:
        inputs: (..., K).
        weight: (N, K).
        bias: (N) or None.
    """
    if not _fast(inputs):
        return F.linear(inputs, weight, bias)
    if not torch.is_grad_enabled():
        return _product(inputs, weight, bias)
    apply: Any = _Linear.apply
    out: Tensor = apply(inputs, weight, bias)
    return out


def product(left: Tensor, right: Tensor) -> Tensor:
    """left rightᵀ, without gradient: (M, K), (N, K) to (M, N). Either may be a transposed view."""
    return _product(left, right, None) if _fast(left) else left @ right.T


def speed_up_linears(model: nn.Module) -> None:
    """Makes every nn.Linear of the model compute through `linear`; parameters and names stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear


class FastLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def _fast(inputs: Tensor) -> bool:
    return (
        _ONEDNN
        and inputs.dtype == torch.float32
        and inputs.device.type == "cpu"
        and inputs.numel() >= _MIN_ROWS * inputs.shape[-1] > 0
    )


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _product(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        need_inputs, need_weight, need_bias = ctx.needs_input_grad
        return (
            _product(grad, weight.T, None).view_as(inputs) if need_inputs else None,
            _product(grad.T, inputs.flatten(0, -2).T, None) if need_weight else None,
            grad.sum(0) if need_bias else None,
        )
