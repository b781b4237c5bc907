"""Discounted sums over ragged sequences, without a loop over time steps.

Shapes: M values of all sequences together, B sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor


def last_indices(offsets: Tensor) -> Tensor:
    """(B+1) to int64: where the last value of every sequence that is not empty stands."""
    ends = offsets[1:]
    return ends[ends > offsets[:-1]] - 1


def reverse_discounted_cumsum_(values: Tensor, offsets: Tensor, discount: float) -> Tensor:
    """Overwrites x with y_t = x_t + discount * y_{t+1} within each sequence, zero after its last value.

    Doubling (Hillis and Steele, 1986): after the pass with step s, y_t holds the first 2s terms
    of its sum, so log2(longest sequence) passes suffice. A pass multiplies by discount**s and
    nothing is ever divided by a power, which keeps float32 accurate at any length and discount;
    terms whose weight underflows are left out.

    Args:
        values: (M) floating point, finite.
        offsets: (B+1) int64 from 0 to M, on the values' device.
        discount: in [0, 1].

    Returns:
        `values`.
    """
    assert values.ndim == 1, values.shape
    assert 0 <= discount <= 1, discount
    if len(values) < 2:
        return values
    # follows[t] is 1 where the value `step` after t belongs to the same sequence, else 0. Numbers,
    # because multiplying by them is several times faster than selecting by bools.
    follows = torch.ones_like(values[1:])
    follows[last_indices(offsets)[:-1]] = 0
    longest = int(offsets.diff().max())
    smallest = torch.finfo(values.dtype).tiny
    step = 1
    while step < longest and discount**step > smallest:
        values[:-step].add_(follows * values[step:], alpha=discount**step)
        follows = follows[:-step] * follows[step:]
        step *= 2
    return values
