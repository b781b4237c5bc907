"""The products of a mixture's experts, sorted by expert.

Each token is computed by the few experts that its router chose. The pairs of token and expert are sorted by
expert, so that each expert computes all of its tokens in one matrix product. On CUDA, transformers' grouped
product is used. On a CPU, each product is one call of `product`, in every dtype.

Shapes: N tokens; K chosen experts per token; S = N K pairs; E experts; D inputs; F outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import (
    ExpertsInterface,
    _default_apply_gate,
    grouped_mm_experts_forward,
)

from tandem.models.collectives import exchanged
from tandem.models.linear import pack, packed_linear, product

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
    if hidden_ND.is_cuda:
        out: Tensor = grouped_mm_experts_forward(module, hidden_ND, chosen_NK, weights_NK)
        return out
    each = chosen_NK.shape[1]
    order_S = chosen_NK.flatten().argsort(stable=True)
    back_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S)))
    counts = torch.bincount(chosen_NK.flatten(), minlength=module.num_experts).tolist()
    experts_S = chosen_NK.flatten()[order_S] if module.has_bias else None

    def spread(x_ND: Tensor) -> Tensor:
        return x_ND.index_select(0, order_S // each)

    def summed(x_SD: Tensor) -> Tensor:
        return x_SD.index_select(0, back_S).view(-1, each, x_SD.shape[1]).sum(1)

    def linear(x_SD: Tensor, name: str) -> Tensor:
        weight = getattr(module, name)
        if isinstance(weight, list):
            out_SF = _each(x_SD, weight, counts, packed_linear)
        else:
            weight_EFD = weight.transpose(1, 2) if module.is_transposed else weight
            out_SF = _Grouped.apply(x_SD, weight_EFD, counts)  # type: ignore[no-untyped-call]
        return out_SF if experts_S is None else out_SF + getattr(module, f"{name}_bias")[experts_S]

    # Both functions are linear, and each is the other's gradient.
    states_SD = exchanged(hidden_ND, spread, summed)
    if module.has_gate:
        states_SF = module._apply_gate(linear(states_SD, "gate_up_proj"))
    else:
        states_SF = module.act_fn(linear(states_SD, "up_proj"))
    out_SD = linear(states_SF, "down_proj")
    out_SD = out_SD * weights_NK.flatten().index_select(0, order_S).unsqueeze(1)
    return exchanged(out_SD, summed, spread).to(hidden_ND.dtype)


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
