"""The output head over a vocabulary that ranks have shared out, each with some rows of the output embedding
(Shoeybi et al. 2019, arXiv 1909.08053, section 3). A rank evaluates its own entries in tiles, as `heads`
does; what is exchanged are numbers per position, and once the gradient of the hidden states.

Shapes: M positions, D hidden features, V vocabulary entries of all ranks, S of this one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tandem.models.heads.tiled import Tiles, logit_gradient, merged, output_type, tiled_gradients
from tandem.models.tensor_group import TensorGroup


def first_entry(vocabulary: int, group: TensorGroup) -> int:
    """The first vocabulary entry of this rank. All have as many, rounded up; the last may have fewer."""
    return group.rank * -(-vocabulary // group.size)


def own_entries(vocabulary: int, group: TensorGroup) -> slice:
    """The vocabulary entries of this rank; see `first_entry`."""
    first = first_entry(vocabulary, group)
    return slice(first, min(vocabulary, first + -(-vocabulary // group.size)))


def split_token_log_probs(
    hidden_MD: Tensor,
    weight_VD: DTensor,
    targets_M: Tensor,
    group: TensorGroup,
    tiles: Tiles,
    *,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """`heads.token_log_probs`, the same on all ranks of the group. With S_r the entries of rank r, the
    probability q_r of the whole S_r and the rank's own p(v | S_r),

        log p(v) = log p(v | S_r) + log q_r        H = Σ_r q_r (H(p(· | S_r)) - log q_r).

    Args:
        hidden_MD: the same on all ranks.
        weight_VD: the output embedding, its rows shared out over the group.
        targets_M: int64 token ids.
        tiles: the work on this rank's entries.
        temperature: divides the logits; > 0.

    Returns:
        (M) log-probabilities and (M) entropies or None, nats; fp32, or fp64 for fp64 input.
    """
    assert hidden_MD.ndim == 2 and targets_M.shape == hidden_MD.shape[:1]
    assert weight_VD.shape[1] == hidden_MD.shape[1] and temperature > 0
    weight_SD = weight_VD.to_local()
    places_M = targets_M - first_entry(weight_VD.shape[0], group)
    apply: Any = _SplitLogProbs.apply
    log_probs, entropy = apply(
        group.copied(hidden_MD), weight_SD, places_M, temperature, with_entropy, group, tiles
    )
    return log_probs, (entropy if with_entropy else None)


class _SplitLogProbs(torch.autograd.Function):
    """The gradients of `heads`, with the normaliser and the entropy of the whole vocabulary; those of the
    hidden states are this rank's share."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_SD: Tensor,
        places_M: Tensor,
        temperature: float,
        with_entropy: bool,
        group: TensorGroup,
        tiles: Tiles,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.tiles = temperature, tiles
        if len(hidden_MD) == 0:  # on all ranks
            none_M = hidden_MD.new_empty(0, dtype=output_type(hidden_MD))
            ctx.save_for_backward(hidden_MD, weight_SD, places_M, none_M, none_M, none_M)
            return none_M, none_M.clone()
        sums = tiles.sums(hidden_MD, weight_SD, places_M, temperature, with_entropy, keep=False)
        own_peak_M, own_total_M, own_entropy_M = merged(sums)  # the total's logarithm
        peak_M = group.all_reduce(own_peak_M.clone(), dist.ReduceOp.MAX)
        log_total_M = group.all_reduce((own_peak_M - peak_M + own_total_M).exp()).log()
        log_q_M = own_peak_M - peak_M + own_total_M - log_total_M
        mine_M = (places_M >= 0) & (places_M < len(weight_SD))
        found = [(sums.target_M - peak_M - log_total_M).masked_fill(~mine_M, 0)]
        if with_entropy:
            found.append(log_q_M.exp() * (own_entropy_M - log_q_M))
        totals = group.all_reduce(torch.stack(found))
        entropy_M = totals[1].clone() if with_entropy else own_entropy_M
        ctx.save_for_backward(hidden_MD, weight_SD, places_M, peak_M, log_total_M, entropy_M)
        return totals[0].clone(), entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_SD, places_M, peak_M, log_total_M, entropy_M = ctx.saved_tensors
        if len(hidden_MD) == 0:
            return torch.empty_like(hidden_MD), torch.zeros_like(weight_SD), *[None] * 5
        wanted = logit_gradient(grads, ctx.temperature, peak_M, log_total_M, entropy_M)
        inputs = (hidden_MD, weight_SD, places_M)
        found = tiled_gradients(ctx.tiles, *inputs, ctx.temperature, wanted, *ctx.needs_input_grad[:2])
        return *found, *[None] * 5
