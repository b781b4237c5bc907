"""Fused RMS norms and gated MLP activations in Triton, for CUDA devices.

In transformers' modules, the forward pass of a norm needs about ten short kernels, and a gate needs three.
The backward pass needs more, and every kernel reads and writes memory. Here the forward pass is one kernel,
the backward pass is one kernel, and fewer tensors are kept between them. The kernels use no atomics, so
results are the same bit for bit in every run.

The kernels replace the `forward` of the modules before the model is compiled, split or sharded. Parameters
and names stay the same. The original forward still runs in three cases: under torch.compile, in double
precision, and if the weights have another precision than the hidden states.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import triton
from torch import Tensor
from transformers import PreTrainedModel

from tandem.models.fused_kernels import gate_gradient_kernel, gate_kernel, norm_gradient_kernel, norm_kernel

_NORMS = {f"{kind}RMSNorm" for kind in ("Llama", "Mistral", "Qwen2", "Qwen3")}
_GATED = {f"{kind}MLP" for kind in ("Llama", "Mistral", "Qwen2", "Qwen3")}
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 4096  # maximum elements per block of a norm
_TILE = 1024  # elements per block of a gate
# Programs of a norm's backward pass. Each program sums the weight's gradient over its rows. The number is
# four per multiprocessor of an H100. It is the same on every device, because it changes how the sum is
# rounded.
_PROGRAMS = 528


def fuse(model: PreTrainedModel) -> int:
    """Make all supported norms and gated layers use `rms_norm` and `gated`, in place.

    Returns:
        The number of modules that were changed.
    """
    found = 0
    for module in model.modules():
        if not type(module).__module__.startswith("transformers.models."):
            continue
        changed: Any = module
        if type(module).__name__ in _NORMS:
            changed.forward = MethodType(_norm_forward, module)
        elif type(module).__name__ in _GATED and changed.config.hidden_act in ("silu", "swish"):
            changed.forward = MethodType(_gated_forward, module)
        else:
            continue
        found += 1
    return found


def rms_norm(x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Return weight · x / sqrt(mean(x²) + eps) over the last dimension, with gradient.

    The computation is in fp32. As in transformers' Llama, Mistral and Qwen, the result is rounded to the type
    of `x` before it is multiplied by the weight.

    Args:
        x: (..., E); float32, bfloat16 or float16.
        weight_E: the same type as `x`.
        eps: the constant that is added to the mean square.
    """
    return _Norm.apply(x, weight_E, eps)  # type: ignore[no-untyped-call, no-any-return]


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up, with gradient. silu(gate) is rounded before the multiplication.

    Args:
        gate: float32, bfloat16 or float16.
        up: same shape and type as `gate`.
    """
    return _Gated.apply(gate, up)  # type: ignore[no-untyped-call, no-any-return]


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    if not _able(hidden_states, self.weight):
        plain: Tensor = type(self).forward(self, hidden_states)
        return plain
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _gated_forward(self: Any, x: Tensor) -> Tensor:
    if not _able(x, x):
        plain: Tensor = type(self).forward(self, x)
        return plain
    out: Tensor = self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))
    return out


def _able(x: Tensor, weight: Tensor) -> bool:
    return x.dtype in _TYPES and weight.dtype == x.dtype and not torch.compiler.is_compiling()


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        x, weight_E = x.contiguous(), weight_E.contiguous()
        out, size = torch.empty_like(x), len(weight_E)
        rows = x.numel() // size
        factors_R = x.new_empty(rows, dtype=torch.float32)
        sizes = _sizes(size)
        if rows:
            norm_kernel[(triton.cdiv(rows, sizes["ROWS"]),)](
                out, factors_R, x, weight_E, rows, eps, **sizes, num_warps=_warps(sizes)
            )
        ctx.save_for_backward(x, weight_E, factors_R)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_E, factors_R = ctx.saved_tensors
        grad, need_weight = grads[0].contiguous(), ctx.needs_input_grad[1]
        rows, sizes = len(factors_R), _sizes(len(weight_E))
        if not rows:
            return torch.empty_like(x), torch.zeros_like(weight_E) if need_weight else None, None
        programs = min(_PROGRAMS, triton.cdiv(rows, sizes["ROWS"]))
        grad_x = torch.empty_like(x)
        parts_PE = factors_R.new_empty(programs if need_weight else 0, len(weight_E))
        tensors = grad_x, parts_PE, grad, x, weight_E, factors_R
        norm_gradient_kernel[(programs,)](
            *tensors, rows, WEIGHT=need_weight, **sizes, num_warps=_warps(sizes)
        )
        return grad_x, parts_PE.sum(0).to(weight_E.dtype) if need_weight else None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        if size := gate.numel():
            gate_kernel[(triton.cdiv(size, _TILE),)](out, gate, up, size, TILE=_TILE)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up, grad = torch.empty_like(gate), torch.empty_like(up), grads[0].contiguous()
        if size := gate.numel():
            gate_gradient_kernel[(triton.cdiv(size, _TILE),)](
                grad_gate, grad_up, grad, gate, up, size, TILE=_TILE
            )
        return grad_gate, grad_up


def _sizes(features: int) -> dict[str, int]:
    pad = triton.next_power_of_2(features)
    return {"E": features, "E_PAD": pad, "ROWS": max(1, _BLOCK // pad)}


def _warps(sizes: dict[str, int]) -> int:
    """Return the number of warps with which each thread has sixteen elements of a block."""
    return min(16, max(1, sizes["ROWS"] * sizes["E_PAD"] // 512))
