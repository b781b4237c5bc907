"""Discounted sums over ragged sequences, without a loop over time steps.

Shapes: M is the number of values of all sequences together, B the number of sequences; values are also
handled as R blocks of K values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.algorithms.masked import require_same_shape

_BLOCK = 64
"""K. A matrix product computes the sums of a block, at a cost of 2K operations per value."""

_TILE = 4096
"""Number of blocks per matrix product, so that the result stays in the CPU cache and needs little new memory.
"""


def last_indices(offsets: Tensor) -> Tensor:
    """Return the index of the last value of every non-empty sequence; `offsets` (B+1) to int64."""
    ends = offsets[1:]
    return ends[ends > offsets[:-1]] - 1


def longest_of(offsets: Tensor) -> int:
    """Return the number of values of the longest sequence; 0 if there are no sequences."""
    return int(offsets.diff().max()) if len(offsets) > 1 else 0


def following(values: Tensor, offsets: Tensor) -> Tensor:
    """Return, for each value, the next value of its sequence, (M); 0 after the last value."""
    after = values.roll(-1)
    after[last_indices(offsets)] = 0
    return after


def reverse_linear_scan_(values: Tensor, coefficients: Tensor, longest: int) -> Tensor:
    """Overwrite x with y_t = x_t + a_t * y_{t+1} along the last dimension.

    After the last value, y is 0. The algorithm is doubling (Hillis and Steele, 1986). After the pass with
    step s, y_t contains the first 2s terms of its sum, and a_t the product of 2s coefficients. So
    log2(longest) passes are enough. The algorithm never divides by a product, which keeps float32 accurate at
    any length.

    Args:
        values: (..., M) floating point, finite.
        coefficients: (..., M) from 0 to 1, and 0 at the end of a sequence. Overwritten with the products a_t
            * a_{t+1} * ... of `longest` coefficients, or fewer at the end of the sequence.
        longest: number of values of the longest sequence.

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
    """Overwrite x with y_t = x_t + discount * y_{t+1} within each sequence.

    After the last value of a sequence, y is 0. The algorithm works in blocks (Blelloch, 1990):

    1. The sums within each block of K values are a product with a triangular matrix of powers of the
    discount.
    2. Blocks in which a sequence ends are recomputed, with a coefficient of 0 at the end of the sequence.
    3. A scan over the blocks computes, for each block, the sum after the block.

    The algorithm never divides by a power, and a sum never includes values of other sequences. This keeps
    float32 accurate at any length and discount.

    Args:
        values: (M) floating point, finite.
        offsets: (B+1) int64, from 0 to M, on the same device as `values`.
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
    # Powers too small for a normal number of the dtype become 0.
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
    """Return y_t = x_t + discount * y_{t-1} within each sequence, (M).

    Before the first value of a sequence, y is 0. Unlike `reverse_discounted_cumsum_`, this works on a copy.
    """
    backwards = reverse_discounted_cumsum_(values.flip(0), offsets[-1] - offsets.flip(0), discount)
    return backwards.flip(0)


def _ended_blocks(values: Tensor, ends: Tensor, discount: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the E blocks in which a sequence ends.

    The very last block, which may be shorter than K, is always one of these blocks.

    Returns:
        (E) indices of these blocks, and three tensors (E, K): the indices of their values; the sums up to the
        end of the sequence or of the block; the weight of the sum after the block, which is 0 before the end
        of a sequence.
    """
    of_end = ends // _BLOCK
    has_end = torch.zeros(-(-len(values) // _BLOCK), dtype=torch.bool, device=values.device)
    has_end[of_end] = True
    mixed, row = has_end.nonzero().squeeze(1), (has_end.cumsum(0) - 1)[of_end]
    places = mixed[:, None] * _BLOCK + torch.arange(_BLOCK, device=values.device)
    sums = values[places.clamp(max=len(values) - 1)]
    coefficients = torch.full_like(sums, discount)
    coefficients[row, ends % _BLOCK] = 0
    return mixed, places, reverse_linear_scan_(sums, coefficients, _BLOCK), coefficients
