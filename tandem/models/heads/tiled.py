"""A head that computes log-probs and entropies in tiles of the vocabulary.

The logits of a tile, for all positions, are computed, used and dropped. The forward pass keeps three numbers
per position and tile. From these numbers, the normalizer and the entropy are computed. The backward pass
computes the logits of each tile again. The gradient of a tile's rows of the weight needs no sum over tiles,
and is written in the type of the weight. Only the gradient of the hidden states, which is small, is summed
over tiles, in fp32. If the logits of all tiles together are small, `TorchTiles` keeps them for the backward
pass. This does not change any bit of the results.

Operations, with multiply and add counted separately: 2 M D V forward, 2 M D V to compute the logits a second
time, and 4 M D V for the two gradients. Memory besides the gradients: a few tiles, for any V, or the kept
logits.

Shapes: M positions, D hidden features, V vocabulary entries, T entries of a tile, S tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.models.linear import product, wide_product
from tandem.models.tensor_group import TensorGroup, local

# The bytes of one tile for each type of device, unless T is at its minimum.
TILE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
_LEAST_TILE = 256
# The maximum bytes of logits that are kept for the backward pass. The number is fixed, because free memory
# differs between ranks and steps, and the memory estimate must depend only on sizes.
_KEPT_BYTES = 256 << 20


def tiled_log_probs(
    tiles: Tiles,
    hidden_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    temperature: float,
    with_entropy: bool,
    group: TensorGroup | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies; see `Head`. `tiles` does the computations inside a tile."""
    if group is not None:
        hidden_MD = group.copied(hidden_MD)
        targets_M = targets_M - group.entries(weight_VD.shape[0]).start
        weight_VD = local(weight_VD)
    assert hidden_MD.ndim == 2 and targets_M.shape == hidden_MD.shape[:1]
    assert weight_VD.shape[1] == hidden_MD.shape[1] and temperature > 0
    size = len(hidden_MD) * len(weight_VD) * output_type(hidden_MD).itemsize
    learns = torch.is_grad_enabled() and (hidden_MD.requires_grad or weight_VD.requires_grad)
    keep = group is None and learns and size <= _KEPT_BYTES
    apply: Any = _TiledLogProbs.apply
    inputs = Inputs(hidden_MD, weight_VD, targets_M, temperature, softcap)
    log_probs, entropy = apply(*inputs, with_entropy, tiles, keep, group)
    return log_probs, (entropy if with_entropy else None)


class Inputs(NamedTuple):
    """The inputs of the head; see `Head`.

    `weight_VD` may have only some consecutive rows of the output embedding. Targets are then counted from the
    first of these rows.
    """

    hidden_MD: Tensor
    weight_VD: Tensor
    targets_M: Tensor
    temperature: float
    softcap: float


@dataclass(frozen=True, slots=True)
class Sums:
    """The maximum and sums of the logits z of each tile; see `Head`.

    Attributes:
        peak_SM: the maximum of z.
        total_SM: Σ exp(z - peak).
        moment_SM: Σ exp(z - peak) (z - peak); None if no entropy is needed.
        target_M: the logit z of the target.
        kept: the logits z of every tile, (M, T) each; empty if logits are not kept.
    """

    peak_SM: Tensor
    total_SM: Tensor
    moment_SM: Tensor | None
    target_M: Tensor
    kept: Sequence[Tensor] = ()


class LogitGradient(NamedTuple):
    """The coefficients of the gradient of the loss with respect to the logits.

    The gradient is p (constant + slope log p), plus `target` at the target token. Here log p = z - peak -
    log_total.

    Let g be the gradient of log p_t, and h the gradient of the entropy H. From d log p_t / dz = onehot_t - p
    and dH / dz = -p (log p + H) follows: constant = -(g + h H) / temperature, slope = -h / temperature,
    target = g / temperature.

    Attributes:
        peak_M: the largest logit.
        log_total_M: log Σ exp(z - peak).
        constant_M: `constant` in the equation.
        slope_M: `slope` in the equation; None if it is zero.
        target_M: `target` in the equation.
    """

    peak_M: Tensor
    log_total_M: Tensor
    constant_M: Tensor
    slope_M: Tensor | None
    target_M: Tensor


class Tiles(Protocol):
    """The protocol of the computations inside a tile. Outputs are fp32 (fp64 for fp64 input) by default."""

    def sums(self, inputs: Inputs, with_moment: bool, *, keep: bool) -> Sums:
        """Return the sums of all tiles, for at least one position and at least one vocabulary entry.

        Args:
            inputs: the head's inputs.
            with_moment: whether entropies are needed.
            keep: whether the logits may be kept for `gradient`.
        """

    def width(self, hidden_MD: Tensor) -> int:
        """Return the number of vocabulary entries per tile in `gradient`. The last tile may be narrower."""

    def gradient(self, tile: Inputs, wanted: LogitGradient, kept_MT: Tensor | None) -> Tensor:
        """Return the gradient with respect to one tile of the product hidden weightᵀ.

        Args:
            tile: the inputs with only the tile's rows of the weight, and target ids counted from the first of
                these rows. Targets outside the tile are ignored.
            wanted: the coefficients of the gradient.
            kept_MT: the tile's logits from `Sums`, which must not be changed; None: the logits are computed
                again.

        Returns:
            (M, T) in the type of `hidden_MD`.
        """


class TorchTiles:
    """`Tiles` implemented with PyTorch's operators.

    Args:
        reduced: processes a tile's logits in the forward pass: `reduced_tile` or an equivalent function.
        graded: processes a tile's logits in the backward pass: `graded_tile` or an equivalent function.
    """

    def __init__(
        self, reduced: Callable[..., Any] | None = None, graded: Callable[..., Any] | None = None
    ) -> None:
        self._reduced, self._graded = reduced or reduced_tile, graded or graded_tile

    def sums(self, inputs: Inputs, with_moment: bool, *, keep: bool) -> Sums:
        hidden_MD, weight_VD, targets_M, *rule = inputs
        peaks, totals = [], []
        moments: list[Tensor] = []
        kept: list[Tensor] = []
        target_M: Tensor | None = None
        for start, weight_TD in tiles_of(weight_VD, self.width(hidden_MD)):
            z_MT = logits(hidden_MD, weight_TD, *rule)
            here_M, index_M1 = _places(targets_M - start, len(weight_TD))
            found_M = z_MT.gather(1, index_M1).squeeze(1)
            target_M = found_M if target_M is None else torch.where(here_M, found_M, target_M)
            peak_M, total_M, moment_M = self._reduced(z_MT, with_moment, keep=keep)
            peaks.append(peak_M)
            totals.append(total_M)
            if moment_M is not None:
                moments.append(moment_M)
            if keep:
                kept.append(z_MT)
        assert target_M is not None
        moment_SM = torch.stack(moments) if with_moment else None
        return Sums(torch.stack(peaks), torch.stack(totals), moment_SM, target_M, kept)

    def width(self, hidden_MD: Tensor) -> int:
        return tile_width(hidden_MD)

    def gradient(self, tile: Inputs, wanted: LogitGradient, kept_MT: Tensor | None) -> Tensor:
        hidden_MD, weight_TD, targets_M, *rule = tile
        z_MT = logits(hidden_MD, weight_TD, *rule) if kept_MT is None else kept_MT
        slope_MT = cap_slope(z_MT, tile.softcap) if tile.softcap else None
        grad_MT = self._graded(z_MT, wanted, keep=kept_MT is not None)
        here_M, index_M1 = _places(targets_M, len(weight_TD))
        grad_MT.scatter_add_(1, index_M1, (wanted.target_M * here_M).unsqueeze(1))
        if slope_MT is not None:
            grad_MT.mul_(slope_MT)
        return grad_MT.to(hidden_MD.dtype)


def reduced_tile(z_MT: Tensor, with_moment: bool, *, keep: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the peak, total and moment of one tile, each (M); see `Sums`.

    The logits are overwritten unless `keep` is set.
    """
    peak_M = z_MT.amax(1)
    shifted_MT = torch.sub(z_MT, peak_M.unsqueeze(1), out=None if keep else z_MT)
    weights_MT = shifted_MT.exp() if with_moment else shifted_MT.exp_()
    moment_M = torch.linalg.vecdot(weights_MT, shifted_MT) if with_moment else None
    return peak_M, weights_MT.sum(1), moment_M


def graded_tile(z_MT: Tensor, wanted: LogitGradient, *, keep: bool) -> Tensor:
    """Return the gradient (M, T) of a tile's logits without the term at the targets; see `LogitGradient`.

    The logits are overwritten unless `keep` is set.
    """
    # Subtract in two steps: the rounded sum of the two numbers would be off by 5e-4 for logits of 1e4.
    shifted_MT = torch.sub(z_MT, wanted.peak_M.unsqueeze(1), out=None if keep else z_MT)
    log_p_MT = shifted_MT.sub_(wanted.log_total_M.unsqueeze(1))
    grad_MT, constant_M1 = log_p_MT.exp(), wanted.constant_M.unsqueeze(1)
    if wanted.slope_M is None:
        return grad_MT.mul_(constant_M1)
    return grad_MT.mul_(log_p_MT.mul_(wanted.slope_M.unsqueeze(1)).add_(constant_M1))


class _TiledLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        targets_M: Tensor,
        temperature: float,
        softcap: float,
        with_entropy: bool,
        tiles: Tiles,
        keep: bool,
        group: TensorGroup | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        if len(hidden_MD) == 0:
            none_M = hidden_MD.new_empty(0, dtype=output_type(hidden_MD))
            ctx.save_for_backward(hidden_MD, weight_VD, targets_M, none_M, none_M, none_M)
            return none_M, none_M.clone()
        inputs = Inputs(hidden_MD, weight_VD, targets_M, temperature, softcap)
        sums = tiles.sums(inputs, with_entropy, keep=keep)
        peak_M, log_total_M, entropy_M = found = merged(sums)
        log_probs_M = sums.target_M - peak_M - log_total_M
        if group is not None:
            here_M, _ = _places(targets_M, len(weight_VD))
            log_probs_M, peak_M, log_total_M, entropy_M = over_ranks(group, sums.target_M, here_M, found)
        ctx.save_for_backward(hidden_MD, weight_VD, targets_M, peak_M, log_total_M, entropy_M, *sums.kept)
        ctx.rule, ctx.tiles = (temperature, softcap), tiles
        return log_probs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_VD, targets_M, peak_M, log_total_M, entropy_M, *kept = ctx.saved_tensors
        if len(hidden_MD) == 0:
            return torch.empty_like(hidden_MD), torch.zeros_like(weight_VD), *[None] * 7
        of_log_probs, of_entropy = (None if grad is None else grad / ctx.rule[0] for grad in grads)
        target_M = torch.zeros_like(peak_M) if of_log_probs is None else of_log_probs
        constant_M = -target_M if of_entropy is None else -(target_M + of_entropy * entropy_M)
        slope_M = None if of_entropy is None else -of_entropy
        wanted = LogitGradient(peak_M, log_total_M, constant_M, slope_M, target_M)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden_MD = torch.zeros_like(hidden_MD, dtype=peak_M.dtype)
        grad_weight_VD = torch.empty_like(weight_VD) if need_weight else None
        for index, (start, weight_TD) in enumerate(tiles_of(weight_VD, ctx.tiles.width(hidden_MD))):
            tile = Inputs(hidden_MD, weight_TD, targets_M - start, *ctx.rule)
            grad_MT = ctx.tiles.gradient(tile, wanted, kept[index] if kept else None)
            if need_hidden:
                grad_hidden_MD += product(grad_MT, weight_TD.T)
            if grad_weight_VD is not None:
                grad_weight_VD[start : start + len(weight_TD)] = product(grad_MT.T, hidden_MD.T)
        return grad_hidden_MD.to(hidden_MD.dtype), grad_weight_VD, *[None] * 7


def merged(sums: Sums) -> tuple[Tensor, Tensor, Tensor]:
    """Return peak, log Σ exp(z - peak) and entropy over all tiles, each (M).

    The entropy is an empty tensor if it is not needed. With w = exp(z - peak), the entropy is H = log Σ w - Σ
    w (z - peak) / Σ w. Both terms have the same sign, so no digits cancel.
    """
    peak_M = sums.peak_SM.amax(0)
    shift_SM = sums.peak_SM - peak_M
    scale_SM = shift_SM.exp()
    total_M = (sums.total_SM * scale_SM).sum(0)
    log_total_M = total_M.log()
    if sums.moment_SM is None:
        return peak_M, log_total_M, peak_M.new_empty(0)
    moment_M = (torch.addcmul(sums.moment_SM, shift_SM, sums.total_SM) * scale_SM).sum(0)
    return peak_M, log_total_M, log_total_M - moment_M / total_M


def over_ranks(
    group: TensorGroup, target_M: Tensor, here_M: Tensor, own: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Combine the log-probs of the targets and the results of `merged` over all ranks.

    S_r is the set of vocabulary entries of rank r, q_r is the total probability of S_r, and p(v | S_r) is the
    distribution over S_r:

        log p(v) = log p(v | S_r) + log q_r        H = Σ_r q_r (H(p(· | S_r)) - log q_r).

    Args:
        group: the ranks that share the vocabulary.
        target_M: the logits of the targets.
        here_M: whether each target is one of this rank's entries.
        own: the result of `merged` for this rank's entries.

    Returns:
        (M) each: log-probs, peak, log Σ exp(z - peak) and entropy, over the whole vocabulary.
    """
    peak_M, log_total_M, entropy_M = own
    whole_peak_M = group.all_reduce(peak_M.clone(), dist.ReduceOp.MAX)
    own_M = peak_M - whole_peak_M + log_total_M
    whole_total_M = group.all_reduce(own_M.exp()).log()
    log_q_M = own_M - whole_total_M
    found = [(target_M - whole_peak_M - whole_total_M).masked_fill(~here_M, 0)]
    if len(entropy_M):
        found.append(log_q_M.exp() * (entropy_M - log_q_M))
    totals = group.all_reduce(torch.stack(found))
    return totals[0].clone(), whole_peak_M, whole_total_M, totals[1].clone() if len(entropy_M) else entropy_M


def output_type(hidden_MD: Tensor) -> torch.dtype:
    """Return the dtype of a head's outputs and sums."""
    return torch.promote_types(hidden_MD.dtype, torch.float32)


def tile_width(hidden_MD: Tensor, dtype: torch.dtype | None = None) -> int:
    """Return T, the number of vocabulary entries of every tile except the last.

    Args:
        hidden_MD: the hidden states.
        dtype: the dtype of a tile's logits; None: the dtype of the outputs.
    """
    budget = TILE_BYTES.get(hidden_MD.device.type, TILE_BYTES["cpu"])
    width = budget // (len(hidden_MD) * (dtype or output_type(hidden_MD)).itemsize)
    return max(_LEAST_TILE, width // _LEAST_TILE * _LEAST_TILE)


def tiles_of(weight_VD: Tensor, width: int) -> list[tuple[int, Tensor]]:
    """Return for each tile the index of its first vocabulary entry, and its rows of the weight."""
    return [(start, weight_VD[start : start + width]) for start in range(0, len(weight_VD), width)]


def _places(targets_M: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return which targets are in the tile (M), and a valid index into the tile for all targets (M, 1)."""
    here_M = (targets_M >= 0) & (targets_M < width)
    return here_M, targets_M.clamp(0, width - 1).unsqueeze(1)


def logits(hidden_MD: Tensor, weight_TD: Tensor, temperature: float, softcap: float = 0.0) -> Tensor:
    """Return the logits (M, T) of a tile in the precision of the outputs; see `Head`."""
    logits_MT = wide_product(hidden_MD, weight_TD)
    if temperature != 1:
        logits_MT.div_(temperature)
    return logits_MT.div_(softcap).tanh_().mul_(softcap) if softcap else logits_MT


def cap_slope(z_MT: Tensor, softcap: float) -> Tensor:
    """Return the derivative of softcap tanh(x / softcap) with respect to x where its value is z, (M, T)."""
    return (z_MT / softcap).square_().neg_().add_(1)


token_log_probs = partial(tiled_log_probs, TorchTiles())
"""The tiled head with PyTorch's operators, for every device and floating type; see `Head`."""
