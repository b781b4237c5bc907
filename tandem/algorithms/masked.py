"""Statistics over the tokens that count, and sums by sequence.

Shapes: N tokens of all sequences together, B sequences; `mask` (N) bool; `offsets` (B+1) int64
from 0 to N, on any device. What stands outside the mask never matters, NaN included.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_TILE = 2**16
"""Values at a time where they are summed."""


def require_same_shape(*tensors: Tensor) -> None:
    """Assert that all tensors have one shape."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    assert len(set(shapes)) == 1, shapes


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
    if _numpy_can(values):
        sums = _numpy_sums(values, offsets)
    else:  # unsafe: a check of the offsets would wait for the device
        sums = torch.segment_reduce(values.double(), "sum", offsets=offsets, unsafe=True)
    return sums.to(dtype or (values.dtype if values.is_floating_point() else torch.int64))


def segment_mean(values: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """(N) to (B): the mean of each sequence's masked values; zero where there is none."""
    counts = segment_sum(mask, offsets).clamp(min=1)
    return segment_sum(torch.where(mask, values, 0), offsets) / counts


def total(values: Tensor) -> Tensor:
    """Scalar float64: the sum of all, without a copy of them in float64."""
    if _numpy_can(values):
        return torch.tensor(values.numpy().sum(dtype=np.float64))
    return values.sum(dtype=torch.float64)


def _numpy_can(values: Tensor) -> bool:
    """True where NumPy can stand in, whose loops over runs are several times faster than PyTorch's."""
    return values.device.type == "cpu" and not values.requires_grad and values.dtype != torch.bfloat16


def _numpy_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """(B) float64. Some values at a time are turned into float64, which is faster than adding them as they
    are, and they stay in the cache."""
    sums = np.zeros(len(offsets) - 1)
    numbers = (values.view(torch.uint8) if values.dtype == torch.bool else values).numpy()
    some = (offsets.diff() > 0).numpy()
    starts, found = offsets[:-1].numpy()[some], np.zeros(some.sum())
    for at in range(0, len(numbers), _TILE):
        tile = numbers[at : at + _TILE].astype(np.float64)
        first = np.searchsorted(starts, at, side="right") - 1
        last = np.searchsorted(starts, at + len(tile))
        found[first:last] += np.add.reduceat(tile, np.maximum(starts[first:last] - at, 0))
    sums[some] = found
    return torch.from_numpy(sums)


def segment_max(values: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """(N) to (B): the largest of each sequence's masked values; zero where there is none."""
    kept = torch.where(mask, values, -torch.inf)
    largest = torch.segment_reduce(kept, "max", offsets=offsets.to(values.device), unsafe=True)
    return torch.where(largest == -torch.inf, 0, largest)


def spread(per_sequence: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """(B) to (N): each sequence's number at its masked tokens, zero elsewhere."""
    lengths = offsets.to(mask.device).diff()
    if not _numpy_can(per_sequence):
        per_token = torch.repeat_interleave(per_sequence, lengths, output_size=len(mask))
        return per_token.masked_fill_(~mask, 0)
    per_token = torch.from_numpy(np.repeat(per_sequence.numpy(), lengths.numpy()))
    if not per_sequence.isfinite().all():
        return per_token.masked_fill_(~mask, 0)
    return zero_outside_(per_token, mask)


def zero_outside_(values: Tensor, mask: Tensor) -> Tensor:
    """Overwrites finite values (N) outside the mask with zero."""
    if not _numpy_can(values):
        return values.masked_fill_(~mask, 0)
    numbers = values.numpy()
    numbers *= mask.numpy()  # several times faster than filling, and nothing of their size is new
    return values


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
    values.sub_(total(values) / max(len(values), 1))
    variance = torch.linalg.vector_norm(values).square() / max(len(values) - 1, 1)
    return values.mul_(torch.rsqrt(variance + 1e-8))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Scalar: 1 - Var(returns - values) / (Var(returns) + 1e-5). One for a perfect critic, zero for
    a constant one, negative for worse; the 1e-5 keeps it finite where all returns are equal."""
    return 1 - masked_var(returns - values, mask) / (masked_var(returns, mask) + 1e-5)
