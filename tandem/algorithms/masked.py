"""Statistics over the tokens that count, and sums by sequence.

Shapes: N tokens of all sequences together, B sequences; `mask` (N) bool; `offsets` (B+1) int64
from 0 to N, on any device. What stands outside the mask never matters, NaN included.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 64
"""K: values that are summed together where sequences are long."""

_TILE = 4096
"""Blocks at a time, so that what is made of them stays in the cache and little memory is new."""


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


def segment_sum(values: Tensor, offsets: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """(N) to (B): the sum of each sequence, accumulated in float64. Zero for an empty sequence. Of type
    `dtype`; where that is None, int64 for bools and integers, else the values' own."""
    offsets = offsets.to(values.device)
    if values.is_cuda or len(values) < 2 * _BLOCK * len(offsets):  # blocks would wait for the device
        sums = _runs(values.double(), offsets)
    else:
        sums = _long_runs(values, offsets)
    return sums.to(dtype or (values.dtype if values.is_floating_point() else torch.int64))


def _runs(values: Tensor, offsets: Tensor) -> Tensor:
    # unsafe: a check of the offsets would wait for the device
    return torch.segment_reduce(values, "sum", offsets=offsets, unsafe=True)


def _long_runs(values: Tensor, offsets: Tensor) -> Tensor:
    """(B) float64, without a copy of all values in float64: blocks of K values are summed, some at a time.
    Those in which a sequence begins are left out, and what stands in them is added by sequence."""
    whole = len(values) // _BLOCK
    rows = values[: whole * _BLOCK].view(-1, _BLOCK)
    # several times faster than sum(dtype=torch.float64)
    blocks = torch.cat([rows[i : i + _TILE].double().sum(1) for i in range(0, len(rows), _TILE)])
    cut = offsets[offsets % _BLOCK != 0] // _BLOCK
    blocks[cut[cut < whole]] = 0
    up, down = -(-offsets // _BLOCK), offsets // _BLOCK
    inner = _runs(blocks, up.clamp(max=whole))
    first, last = up[:-1] * _BLOCK, torch.maximum(up[:-1], down[1:]) * _BLOCK
    head = _fewer_than_a_block(values, offsets[:-1], torch.minimum(first, offsets[1:]))
    return inner + head + _fewer_than_a_block(values, last, offsets[1:])


def _fewer_than_a_block(values: Tensor, starts: Tensor, stops: Tensor) -> Tensor:
    """(B) float64: the sums of the values from `starts` to `stops`."""
    places = starts[:, None] + torch.arange(_BLOCK, device=values.device)
    inside = places < stops[:, None]
    return torch.where(inside, values[places.clamp_(max=len(values) - 1)], 0).sum(1, dtype=torch.float64)


def segment_max(values: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """(N) to (B): the largest of each sequence's masked values; zero where there is none."""
    kept = torch.where(mask, values, -torch.inf)
    largest = torch.segment_reduce(kept, "max", offsets=offsets.to(values.device), unsafe=True)
    return torch.where(largest == -torch.inf, 0, largest)


def spread(per_sequence: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """(B) to (N): each sequence's number at its masked tokens, zero elsewhere."""
    offsets = offsets.to(mask.device)
    if mask.is_cuda or per_sequence.requires_grad or len(mask) < 2 * _BLOCK * len(offsets):
        per_token = torch.repeat_interleave(per_sequence, offsets.diff(), output_size=len(mask))
    else:
        per_token = _spread_long(per_sequence, len(mask), offsets)
    return per_token.masked_fill_(~mask, 0)


def _spread_long(per_sequence: Tensor, total: int, offsets: Tensor) -> Tensor:
    """(N), without an index for each token, and without a gradient: blocks of K take the number of the
    sequence they begin in; those in which another begins are done again token by token."""
    begins = torch.arange(0, total, _BLOCK, device=offsets.device)
    per_block = per_sequence[torch.searchsorted(offsets, begins, right=True) - 1]
    per_token = per_block[:, None].expand(-1, _BLOCK).reshape(-1)[:total]
    cut = offsets[(offsets % _BLOCK != 0) & (offsets < total)] // _BLOCK
    places = (cut[:, None] * _BLOCK + torch.arange(_BLOCK, device=offsets.device)).clamp_(max=total - 1)
    per_token[places] = per_sequence[torch.searchsorted(offsets, places, right=True) - 1]
    return per_token


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar: the mean over the masked tokens; zero where there is none."""
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar: the unbiased variance over the masked tokens; zero for fewer than two."""
    squares = torch.where(mask, values - masked_mean(values, mask), 0).square()
    return squares.sum() / (mask.sum() - 1).clamp(min=1)


def whiten_(values: Tensor) -> Tensor:
    """Overwrites (M) with (x - mean) / sqrt(unbiased variance + 1e-8). The mean is taken in float64, so that
    equal values become exactly zero; so does a single one."""
    values.sub_(values.mean(dtype=torch.float64))
    variance = torch.linalg.vector_norm(values).square() / max(len(values) - 1, 1)
    return values.mul_(torch.rsqrt(variance + 1e-8))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Scalar: 1 - Var(returns - values) / (Var(returns) + 1e-5). One for a perfect critic, zero for
    a constant one, negative for worse; the 1e-5 keeps it finite where all returns are equal."""
    return 1 - masked_var(returns - values, mask) / (masked_var(returns, mask) + 1e-5)
