"""Exact quantities over the vocabulary: the sum of squared probabilities and the KL divergence.

Both are computed in tiles of the vocabulary, as in `tiled`. They always use PyTorch's operators, even if
another head computes the log-probs.

If ranks share the vocabulary, each rank processes its entries of the vocabulary, and the ranks exchange a few
numbers per position. Logits of half-precision hidden states are computed in fp32, because the difference of
two rounded logits would lose most of its digits. The results of the tiles are combined in float64.

Shapes: M positions, D hidden features, V vocabulary entries (of this rank), T entries of a tile, S tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.models.heads.tiled import cap_slope, logits, output_type, tile_width, tiles_of
from tandem.models.linear import product
from tandem.models.tensor_group import TensorGroup


@torch.no_grad()
def sum_pi_squared(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    *,
    temperature: float,
    group: TensorGroup | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Return Σ_v p(v)² of p = softmax(z) at each position, without gradient. `Head` defines the logits z.

    This is the probability that two tokens sampled at the position are equal. It needs as many operations as
    log-probs.

    Args:
        hidden_MD: hidden states that predict the tokens, any floating type.
        weight_VD: the output embedding, same type; this rank's rows if there is a group.
        temperature: divides the logits; > 0.
        group: the ranks that share the vocabulary; None: this rank has the whole vocabulary.
        softcap: the largest absolute value of a logit; 0: there is no limit.

    Returns:
        (M) sums in (0, 1]; fp32, or fp64 for fp64 input.
    """
    if len(hidden_MD) == 0:
        return hidden_MD.new_empty(0, dtype=output_type(hidden_MD))
    found = []
    for _, weight_TD in tiles_of(weight_VD, tile_width(hidden_MD)):
        z_MT = _logits(hidden_MD, weight_TD, temperature, softcap)
        peak_M = z_MT.amax(1)
        weights_MT = z_MT.sub_(peak_M.unsqueeze(1)).exp_()
        found.append(torch.stack([peak_M, weights_MT.sum(1), weights_MT.square_().sum(1)]).double())
    peak_SM, total_SM, square_SM = torch.stack(found, 1)
    peak_M = _peak(peak_SM, group)
    scale_SM = (peak_SM - peak_M).exp()
    total_M = _total(total_SM * scale_SM, group)
    square_M = _total(square_SM * scale_SM.square(), group)
    return (square_M / total_M.square()).to(output_type(hidden_MD))


def kl_divergence(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    other_MD: Tensor,
    other_weight_VD: Tensor,
    *,
    temperature: float,
    group: TensorGroup | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Return the exact KL divergence over the whole vocabulary at each position, with its exact gradient.

    Equation (p = softmax(z) of the policy, with the logits z that `Head` defines; q the same of the
    reference, or of any other distribution that p is compared with):

        KL(p || q) = Σ_v p(v) (log p(v) - log q(v))
        d KL / d z(v) = p(v) (log p(v) - log q(v) - KL)

    The backward pass computes the tiles of both distributions again.

    When to use: if an estimate from the sampled tokens is too noisy, for instance with a small coefficient or
    close to the reference. Given the tokens before a position, this divergence has no variance, and its
    gradient is exact.
    Watch: `actor/kl`, or `actor/kl_in_reward`, which start at zero and are never negative.
    Cost: the reference sends its last hidden states to the actor, D numbers per token in compute dtype
    instead of one number (7 KB per token for D = 3584 in bf16). Each rank of the actor also holds the
    reference's output embedding (V D numbers). The forward pass takes twice the operations of the log-probs'
    head, the backward pass 1.5 times.
    Source: the definition; Tang and Munos 2025, https://arxiv.org/abs/2506.09477, on why the gradient through
    the drawn tokens is not part of it.

    Args:
        hidden_MD: hidden states that predict the tokens, any floating type.
        weight_VD: the output embedding, same type; this rank's rows if there is a group.
        other_MD: the hidden states of the distribution to compare with; no gradient.
        other_weight_VD: the output embedding of the distribution to compare with; no gradient.
        temperature: divides the logits; > 0.
        group: the ranks that share the vocabulary; None: this rank has the whole vocabulary.
        softcap: the largest absolute value of a logit; 0: there is no limit.

    Returns:
        (M) KL in nats, never negative; fp32, or fp64 for fp64 input.
    """
    assert hidden_MD.shape == other_MD.shape, (hidden_MD.shape, other_MD.shape)
    assert weight_VD.shape == other_weight_VD.shape, (weight_VD.shape, other_weight_VD.shape)
    states_MD = hidden_MD if group is None else group.copied(hidden_MD)
    return _KLDivergence.apply((temperature, softcap), group, states_MD, weight_VD, other_MD, other_weight_VD)  # type: ignore[no-untyped-call, no-any-return]


class _KLDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: tuple[float, float], group: TensorGroup | None, *inputs: Tensor) -> Tensor:
        hidden_MD, weight_VD, other_MD, other_weight_VD = inputs
        ctx.rule = rule
        if len(hidden_MD) == 0:
            ctx.save_for_backward(*inputs)
            return hidden_MD.new_empty(0, dtype=output_type(hidden_MD))
        found = []
        for start, weight_TD in tiles_of(weight_VD, tile_width(hidden_MD)):
            z_MT = _logits(hidden_MD, weight_TD, *rule)
            y_MT = _logits(other_MD, other_weight_VD[start : start + len(weight_TD)], *rule)
            peak_M, other_peak_M = z_MT.amax(1), y_MT.amax(1)
            # Subtract each peak first: the difference of two large logits would lose its digits.
            z_MT.sub_(peak_M.unsqueeze(1))
            y_MT.sub_(other_peak_M.unsqueeze(1))
            weights_MT = z_MT.exp()
            cross_M = torch.linalg.vecdot(weights_MT, z_MT.sub_(y_MT))
            sums = (peak_M, weights_MT.sum(1), other_peak_M, y_MT.exp_().sum(1), cross_M)
            found.append(torch.stack(sums).double())
        peak_SM, total_SM, other_peak_SM, other_total_SM, cross_SM = torch.stack(found, 1)
        peak_M, other_peak_M = _peak(peak_SM, group), _peak(other_peak_SM, group)
        total_M = _total(total_SM * (peak_SM - peak_M).exp(), group)
        other_total_M = _total(other_total_SM * (other_peak_SM - other_peak_M).exp(), group)
        # The sums Σ w (z - y) of the tiles, corrected for the subtracted peaks.
        shift_SM = (peak_SM - peak_M) - (other_peak_SM - other_peak_M)
        crossed_M = _total((cross_SM + shift_SM * total_SM) * (peak_SM - peak_M).exp(), group)
        log_total_M, other_log_total_M = total_M.log(), other_total_M.log()
        divergence_M = (crossed_M / total_M - log_total_M + other_log_total_M).clamp(min=0)
        made = (peak_M, log_total_M, other_peak_M, other_log_total_M, divergence_M)
        saved = [value.to(output_type(hidden_MD)) for value in made]
        ctx.save_for_backward(*inputs, *saved)
        return saved[-1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_VD, other_MD, other_weight_VD, *saved = ctx.saved_tensors
        if len(hidden_MD) == 0:
            return None, None, torch.empty_like(hidden_MD), torch.zeros_like(weight_VD), None, None
        peak_M, log_total_M, other_peak_M, other_log_total_M, divergence_M = saved
        temperature, softcap = ctx.rule
        slope_M1 = (grads[0] / temperature).unsqueeze(1)
        grad_hidden_MD = torch.zeros_like(hidden_MD, dtype=peak_M.dtype)
        grad_weight_VD = torch.empty_like(weight_VD) if ctx.needs_input_grad[3] else None
        for start, weight_TD in tiles_of(weight_VD, tile_width(hidden_MD)):
            other_TD = other_weight_VD[start : start + len(weight_TD)]
            z_MT = _logits(hidden_MD, weight_TD, *ctx.rule)
            cap_slope_MT = cap_slope(z_MT, softcap) if softcap else None
            log_p_MT = z_MT.sub_(peak_M.unsqueeze(1)).sub_(log_total_M.unsqueeze(1))
            log_q_MT = _logits(other_MD, other_TD, *ctx.rule).sub_(other_peak_M.unsqueeze(1))
            log_q_MT.sub_(other_log_total_M.unsqueeze(1))
            excess_MT = log_q_MT.neg_().add_(log_p_MT).sub_(divergence_M.unsqueeze(1))
            grad_MT = log_p_MT.exp_().mul_(excess_MT).mul_(slope_M1)
            if cap_slope_MT is not None:
                grad_MT.mul_(cap_slope_MT)
            grad_MT = grad_MT.to(hidden_MD.dtype)
            grad_hidden_MD += product(grad_MT, weight_TD.T)
            if grad_weight_VD is not None:
                grad_weight_VD[start : start + len(weight_TD)] = product(grad_MT.T, hidden_MD.T)
        return None, None, grad_hidden_MD.to(hidden_MD.dtype), grad_weight_VD, None, None


def _logits(hidden_MD: Tensor, weight_TD: Tensor, temperature: float, softcap: float) -> Tensor:
    """Return the logits (M, T) of a tile in the precision of the result."""
    if not hidden_MD.is_cuda:  # on a CPU `wide_product` would round to half precision
        hidden_MD, weight_TD = (values.to(output_type(hidden_MD)) for values in (hidden_MD, weight_TD))
    return logits(hidden_MD, weight_TD, temperature, softcap)


def _peak(peak_SM: Tensor, group: TensorGroup | None) -> Tensor:
    """Return the maximum over tiles and ranks, (M)."""
    peak_M = peak_SM.amax(0)
    return peak_M if group is None else group.all_reduce(peak_M, dist.ReduceOp.MAX)


def _total(values_SM: Tensor, group: TensorGroup | None) -> Tensor:
    """Return the sum over tiles and ranks, (M)."""
    total_M = values_SM.sum(0)
    return total_M if group is None else group.all_reduce(total_M)
