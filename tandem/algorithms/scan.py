"""Discounted sums over ragged sequences, without a loop over time steps.

Shapes: M values of all sequences together, B sequences, R blocks of K values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.masked import require_same_shape

_BLOCK = 64
"""K: a block's sums are one row of a matrix product, which costs 2K operations a value."""

_TILE = 4096
"""Blocks at a time, so that what the product writes stays in the cache and little memory is new."""


def last_indices(offsets: Tensor) -> Tensor:
    """(B+1) to int64: where the last value of every sequence that is not empty stands."""
    ends = offsets[1:]
    return ends[ends > offsets[:-1]] - 1


def longest_of(offsets: Tensor) -> int:
    """Values of the longest sequence; zero where there is none."""
    return int(offsets.diff().max()) if len(offsets) > 1 else 0


def following(values: Tensor, offsets: Tensor) -> Tensor:
    """(M): the value after each one in its sequence, zero after the last."""
    after = values.roll(-1)
    after[last_indices(offsets)] = 0
    return after


def reverse_linear_scan_(values: Tensor, coefficients: Tensor, longest: int) -> Tensor:
    """Overwrites x with y_t = x_t + a_t * y_{t+1} along the last dimension, zero after its end.

    Doubling (Hillis and Steele, 1986): after the pass with step s, y_t holds the first 2s terms of its sum
    and a_t the product of as many coefficients, so log2(longest) passes suffice. Nothing is ever divided by
    a product, which keeps float32 accurate at any length.

    Args:
        values: (..., M) floating point, finite.
        coefficients: (..., M) from 0 to 1, zero at the end of a sequence. Overwritten with the products
            a_t * a_{t+1} * ... of `longest` coefficients or to the end.
        longest: of the sequences.

    Returns:
        `values`.
    """
    require_same_shape(values, coefficients)
    step, stop = 1, min(longest, values.shape[-1])
    while step < stop:
        head = coefficients[..., :-step]
        values[..., :-step] += head * values[..., step:]
        head.copy_(head * coefficients[..., step:])
        step *= 2
    return values


def reverse_discounted_cumsum_(values: Tensor, offsets: Tensor, discount: float) -> Tensor:
    """Overwrites x with y_t = x_t + discount * y_{t+1} within each sequence, zero after its last value.

    In blocks (Blelloch, 1990): the sums within blocks of K values are a product with the triangle of powers
    of the discount; the blocks in which a sequence ends are done again with a coefficient of zero there; a
    scan over blocks gives each one the sum after it. Nothing is ever divided by a power, and what belongs to
    another sequence never enters a sum, which keeps float32 accurate at any length and discount.

    Args:
        values: (M) floating point, finite.
        offsets: (B+1) int64 from 0 to M, on the values' device.
        discount: in [0, 1].

    Returns:
        `values`.
    """
    assert values.ndim == 1, values.shape
    assert 0 <= discount <= 1, discount
    count, ends = len(values), last_indices(offsets)
    longest = longest_of(offsets)
    if longest <= 2 * _BLOCK:
        coefficients = torch.full_like(values, discount)
        coefficients[ends] = 0
        return reverse_linear_scan_(values, coefficients, longest)
    powers = torch.full((_BLOCK + 1,), discount, dtype=torch.float64, device=values.device)
    powers = powers.pow_(torch.arange(_BLOCK + 1, device=values.device))
    # Those too small for the type are zero.
    powers = powers.masked_fill_(powers < torch.finfo(values.dtype).tiny, 0).to(values.dtype)
    mixed, places, mixed_sums, mixed_carry = _ended_blocks(values, ends, discount)
    whole_RK = values[: count // _BLOCK * _BLOCK].view(-1, _BLOCK)
    rows_K = torch.arange(_BLOCK, device=values.device)
    triangle = powers[(rows_K[:, None] - rows_K).clamp(min=0)].tril()  # discount**(row - column)
    for start in range(0, len(whole_RK), _TILE):
        part = whole_RK[start : start + _TILE]
        part.copy_(part @ triangle)

    firsts = values[::_BLOCK].clone()
    carry = torch.full_like(firsts, float(powers[_BLOCK]))
    firsts[mixed], carry[mixed] = mixed_sums[:, 0], 0
    after = reverse_linear_scan_(firsts, carry, 1 + -(-longest // _BLOCK)).roll(-1)
    after[-1] = 0
    whole_RK.addr_(after[: len(whole_RK)], powers[1:].flip(0))
    mixed_sums.addcmul_(mixed_carry, after[mixed, None])
    inside = places < count
    values[places[inside]] = mixed_sums[inside]
    return values


def discounted_cumsum(values: Tensor, offsets: Tensor, discount: float) -> Tensor:
    """(M): y_t = x_t + discount * y_{t-1} within each sequence, zero before its first value; else as
    `reverse_discounted_cumsum_`, and of a copy."""
    backwards = reverse_discounted_cumsum_(values.flip(0), offsets[-1] - offsets.flip(0), discount)
    return backwards.flip(0)


def _ended_blocks(values: Tensor, ends: Tensor, discount: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The numbers (E) of the blocks in which a sequence ends, of which the last, which may be short, is one;
    and (E, K) each: where their values stand, their sums up to the end of a sequence or of the block, and the
    weight of the sum after the block, which is zero before a sequence's end."""
    of_end = ends // _BLOCK
    has_end = torch.zeros(-(-len(values) // _BLOCK), dtype=torch.bool, device=values.device)
    has_end[of_end] = True
    mixed, row = has_end.nonzero().squeeze(1), (has_end.cumsum(0) - 1)[of_end]
    places = mixed[:, None] * _BLOCK + torch.arange(_BLOCK, device=values.device)
    sums = values[places.clamp(max=len(values) - 1)]
    coefficients = torch.full_like(sums, discount)
    coefficients[row, ends % _BLOCK] = 0
    return mixed, places, reverse_linear_scan_(sums, coefficients, _BLOCK), coefficients
