"""Statistics over the tokens that count, and sums by sequence.

Shapes: N tokens of all sequences together, B sequences; `mask` (N) bool; `offsets` (B+1) int64
from 0 to N, on any device. What stands outside the mask never matters, NaN included.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Kept(NamedTuple):
    """The masked tokens of a batch.

    Attributes:
        indices: (M) int64, where they stand among the N.
        offsets: (B+1) int64, where each sequence starts among the M.
    """

    indices: Tensor
    offsets: Tensor


def kept_tokens(mask: Tensor, offsets: Tensor) -> Kept:
    """The tokens where `mask` is true, still grouped by sequence."""
    assert mask.ndim == 1, mask.shape
    assert mask.dtype == torch.bool, mask.dtype
    indices = mask.nonzero().squeeze(1)
    return Kept(indices, torch.searchsorted(indices, offsets.to(mask.device)))


def scatter(kept: Tensor, indices: Tensor, total: int) -> Tensor:
    """(M) to (N): the values at their places, zero elsewhere."""
    return kept.new_zeros(total).index_copy_(0, indices, kept)


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """(N) to (B): the sum of each sequence, accumulated in float64. Zero for an empty sequence;
    int64 for bools and integers, else of the values' dtype."""
    # unsafe: a check of the offsets would wait for the device
    sums = torch.segment_reduce(values.double(), "sum", offsets=offsets.to(values.device), unsafe=True)
    return sums.to(values.dtype if values.is_floating_point() else torch.int64)


def spread(per_sequence: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """(B) to (N): each sequence's number at its masked tokens, zero elsewhere."""
    lengths = offsets.to(mask.device).diff()
    per_token = torch.repeat_interleave(per_sequence, lengths, output_size=len(mask))
    return torch.where(mask, per_token, 0)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar: the mean over the masked tokens; zero where there is none."""
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar: the unbiased variance over the masked tokens; zero for fewer than two."""
    squares = torch.where(mask, values - masked_mean(values, mask), 0).square()
    return squares.sum() / (mask.sum() - 1).clamp(min=1)


def whiten(values: Tensor) -> Tensor:
    """(M): (x - mean) / sqrt(unbiased variance + 1e-8). The mean is taken in float64, so that equal
    values become exactly zero; so does a single one."""
    centered = values - values.mean(dtype=torch.float64)
    variance = torch.linalg.vector_norm(centered).square() / max(len(values) - 1, 1)
    return centered.mul_(torch.rsqrt(variance + 1e-8))


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(N): `whiten` over the masked tokens, zero elsewhere."""
    indices = mask.nonzero().squeeze(1)
    return scatter(whiten(values.index_select(0, indices)), indices, len(mask))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Scalar: 1 - Var(returns - values) / (Var(returns) + 1e-5). One for a perfect critic, zero for
    a constant one, negative for worse; the 1e-5 keeps it finite where all returns are equal."""
    return 1 - masked_var(returns - values, mask) / (masked_var(returns, mask) + 1e-5)
