"""The products of a mixture's experts, sorted by expert.

Each token is computed by the few experts that its router chose. The pairs of token and expert are sorted by
expert, so that each expert computes all of its tokens in one matrix product. On CUDA, transformers' grouped
product is used. On a CPU, each product is one call of `product`, in every dtype.

Experts can have low-rank adapters; see `tandem.models.lora`.

Shapes: N tokens; K chosen experts per token; S = N K pairs; E experts; D inputs; F outputs; R the rank of
adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import (
    ExpertsInterface,
    _default_apply_gate,
    grouped_mm_experts_forward,
)

from tandem.models.collectives import exchanged
from tandem.models.linear import pack, packed_linear, product
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
        if not isinstance(weight, list):
            weight = weight.transpose(1, 2) if module.is_transposed else weight
        out_SF = by_expert(x_SD, weight)
        if module.has_bias:
            out_SF = out_SF + getattr(module, f"{name}_bias")[experts_S]
        return out_SF + _adapted(module, adapters[name], x_SD, by_expert) if name in adapters else out_SF

    # Both functions are linear, and each is the other's gradient.
    states_SD = exchanged(hidden_ND, spread, summed)
    if module.has_gate:
        states_SF = module._apply_gate(linear(states_SD, "gate_up_proj"))
    else:
        states_SF = module.act_fn(linear(states_SD, "up_proj"))
    out_SD = linear(states_SF, "down_proj")
    out_SD = out_SD * weights_NK.flatten().index_select(0, order_S).unsqueeze(1)
    return exchanged(out_SD, summed, spread).to(hidden_ND.dtype)


def _adapted(module: Any, layer: Any, x_SD: Tensor, by_expert: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return (S, F) the output of an adapter, s B A x. Expert parallelism does not divide the factors."""
    here = slice(module.first_expert, module.first_expert + module.num_experts)
    a_ERD, b_EFR = (factor[here] for factor in matrices(layer, *map(local, factors(layer))))
    if x_SD.is_cuda:  # the kernel needs rows of a multiple of 16 bytes
        more = -a_ERD.shape[1] % 8
        a_ERD, b_EFR = F.pad(a_ERD, (0, 0, 0, more)), F.pad(b_EFR, (0, more))
    return by_expert(scaling_of(layer) * by_expert(x_SD, a_ERD), b_EFR.contiguous())


def _by_expert(experts_S: Tensor, count: int) -> Callable[[Tensor, Any], Tensor]:
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

    def by_expert(x_SD: Tensor, weight_EFD: Any) -> Tensor:
        if isinstance(weight_EFD, list):
            return _each(x_SD, weight_EFD, counts, packed_linear)
        out: Tensor = _Grouped.apply(x_SD, weight_EFD, counts)  # type: ignore[no-untyped-call]
        return out

    return by_expert


def sparse_inputs(block: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a forward of a mixture of Llama 4 that computes only the chosen experts.

    These mixtures multiply the inputs of the experts by the router's scores, and the scores of experts that
    are not chosen are 0. transformers computes all experts, and those with inputs of 0 return 0.

    Args:
        block: the mixture. The forward of its experts is replaced.
    """
    experts = block.experts
    experts.has_bias, experts.has_gate, experts.is_transposed = False, True, True
    experts._is_expert_parallel = False
    experts._apply_gate = MethodType(_default_apply_gate, experts)
    experts.forward = MethodType(sorted_experts, experts)

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden_ND = hidden.reshape(-1, block.hidden_dim)
        scores_NE, logits_NE = block.router(hidden_ND)
        scores_NK, chosen_NK = torch.topk(scores_NE, block.top_k, dim=1)
        states_SD = (hidden_ND[:, None] * scores_NK[:, :, None]).to(hidden.dtype).flatten(0, 1)
        ones_S1 = torch.ones_like(states_SD[:, :1])
        out_SD = experts(states_SD, chosen_NK.reshape(-1, 1), ones_S1)
        return block.shared_expert(hidden_ND) + out_SD.unflatten(0, scores_NK.shape).sum(1), logits_NE

    return forward


def pack_experts(module: Any) -> None:
    """Replace the weights of an experts module by packed weights, for `sorted_experts` without gradients."""
    for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        weight = module._parameters.pop(name)
        setattr(module, name, [pack(each) for each in (weight.mT if module.is_transposed else weight)])


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


def _each(
    x_SD: Tensor,
    weight_EFD: Tensor | Sequence[Tensor],
    counts: list[int],
    product: Callable[[Tensor, Tensor], Tensor] = product,
) -> Tensor:
    parts = zip(counts, torch.split(x_SD, counts), weight_EFD, strict=True)
    outs = [product(x_TD, weight_FD) for count, x_TD, weight_FD in parts if count]
    return torch.cat(outs) if outs else x_SD.new_empty(0, len(weight_EFD[0]))


ExpertsInterface.register(EXPERTS, sorted_experts)
