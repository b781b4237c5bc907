"""The products of a mixture's experts, sorted by expert.

Each token is computed by the few experts that its router chose. The pairs of token and expert are sorted by
expert, so that each expert computes all of its tokens in one matrix product. On CUDA, transformers' grouped
product is used. On a CPU, each product is one call of `product`, in every dtype.

Experts can have low-rank adapters; see `tandem.models.lora`.

Shapes: N tokens; K chosen experts per token; S = N K pairs; E experts; D inputs; F outputs; R the rank of
adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from tandem.models.collectives import exchanged
from tandem.models.linear import product
from tandem.models.lora import factors, matrices, scaling_of
from tandem.models.tensor_group import local

EXPERTS = "tandem"
"""The name of `sorted_experts` in transformers' interface for experts."""


def sorted_experts(module: Any, hidden_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Return (N, D) the weighted sum of the outputs of each token's experts.

    Args:
        module: an experts module of transformers, with the weights of all experts in one tensor per layer.
        hidden_ND: the tokens' hidden states.
        chosen_NK: int64, the numbers of the experts that compute each token.
        weights_NK: the weight of each expert's output.
    """
    adapters = getattr(module, "adapters", {})
    adapters = {name: layer for name, layer in adapters.items() if not layer.disable_adapters}
    if hidden_ND.is_cuda and not adapters:
        out: Tensor = grouped_mm_experts_forward(module, hidden_ND, chosen_NK, weights_NK)
        return out
    each = chosen_NK.shape[1]
    experts_S, order_S = chosen_NK.flatten().sort(stable=True)
    places_S = torch.arange(len(order_S), device=order_S.device)
    back_S = torch.empty_like(order_S).scatter_(0, order_S, places_S)
    by_expert = _by_expert(experts_S, module.num_experts)

    def spread(x_ND: Tensor) -> Tensor:
        return x_ND.index_select(0, order_S // each)

    def summed(x_SD: Tensor) -> Tensor:
        return x_SD.index_select(0, back_S).view(-1, each, x_SD.shape[1]).sum(1)

    def linear(x_SD: Tensor, name: str) -> Tensor:
        weight = getattr(module, name)
        weight_EFD = weight.transpose(1, 2) if module.is_transposed else weight
        out_SF = by_expert(x_SD, weight_EFD)
        if module.has_bias:
            out_SF = out_SF + getattr(module, f"{name}_bias")[experts_S]
        return out_SF + _adapted(adapters[name], x_SD, by_expert) if name in adapters else out_SF

    # Both functions are linear, and each is the other's gradient.
    states_SD = exchanged(hidden_ND, spread, summed)
    if module.has_gate:
        states_SF = module._apply_gate(linear(states_SD, "gate_up_proj"))
    else:
        states_SF = module.act_fn(linear(states_SD, "up_proj"))
    out_SD = linear(states_SF, "down_proj")
    out_SD = out_SD * weights_NK.flatten().index_select(0, order_S).unsqueeze(1)
    return exchanged(out_SD, summed, spread).to(hidden_ND.dtype)


def _adapted(layer: Any, x_SD: Tensor, by_expert: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return (S, F) the output of an adapter, s B A x."""
    a_ERD, b_EFR = matrices(layer, *map(local, factors(layer)))
    if x_SD.is_cuda:  # the kernel needs rows of a multiple of 16 bytes
        more = -a_ERD.shape[1] % 8
        a_ERD, b_EFR = F.pad(a_ERD, (0, 0, 0, more)), F.pad(b_EFR, (0, more))
    return by_expert(scaling_of(layer) * by_expert(x_SD, a_ERD), b_EFR.contiguous())


def _by_expert(experts_S: Tensor, count: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of (S, D) and (E, F, D) that computes (S, F) with each pair's expert.

    Args:
        experts_S: the sorted experts of the pairs.
        count: E.
    """
    numbers_E = torch.arange(count, device=experts_S.device)
    ends_E = torch.searchsorted(experts_S, numbers_E, right=True, out_int32=True)
    if experts_S.is_cuda:
        return lambda x_SD, weight_EFD: F.grouped_mm(x_SD, weight_EFD.transpose(1, 2), offs=ends_E)
    counts = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    return lambda x_SD, weight_EFD: _Grouped.apply(x_SD, weight_EFD, counts)  # type: ignore[no-untyped-call, no-any-return]


class _Grouped(torch.autograd.Function):
    """The product of each expert's tokens with its weight: (S, D) and (E, F, D) to (S, F).

    The tokens are sorted by expert, and `counts` is the number of tokens of each expert.
    """

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, weight_EFD: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x_SD, weight_EFD)
        ctx.counts = counts
        return _each(x_SD, weight_EFD, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_SD, weight_EFD = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _each(grads[0], weight_EFD.transpose(1, 2), ctx.counts)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight_EFD)
            parts = zip(grad_weight, *(torch.split(x, ctx.counts) for x in (grads[0], x_SD)), strict=True)
            for grad_FD, grad_TF, x_TD in parts:
                grad_FD.copy_(product(grad_TF.T, x_TD.T)) if len(x_TD) else grad_FD.zero_()
        return grad_x, grad_weight, None


def _each(x_SD: Tensor, weight_EFD: Tensor, counts: list[int]) -> Tensor:
    out_SF = x_SD.new_empty(len(x_SD), weight_EFD.shape[1])
    parts = zip(*(torch.split(x, counts) for x in (out_SF, x_SD)), weight_EFD, strict=True)
    for out_TF, x_TD, weight_FD in parts:
        if len(x_TD):
            out_TF.copy_(product(x_TD, weight_FD))
    return out_SF


ExpertsInterface.register(EXPERTS, sorted_experts)
