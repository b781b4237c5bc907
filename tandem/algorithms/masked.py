"""Statistics over the tokens of a mask, and sums per sequence.

Shapes: N is the number of tokens of all sequences together, B the number of sequences, M the number of tokens
in the mask; `mask` is (N) bool; `offsets` is (B+1) int64, from 0 to N, on any device. Values outside the mask
are ignored, even NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_TILE = 2**16
"""Number of values that are summed at a time."""


def require_same_shape(*tensors: Tensor) -> None:
    """Assert that all tensors have the same shape."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    assert len(set(shapes)) == 1, shapes


class Kept(NamedTuple):
    """The masked tokens of a batch.

    Attributes:
        indices: (M) int64, the index of each masked token among the N tokens.
        offsets: (B+1) int64, the start of each sequence among the M tokens.
    """

    indices: Tensor
    offsets: Tensor


def kept_tokens(mask: Tensor, offsets: Tensor) -> Kept:
    """Return the tokens at which `mask` is true, grouped by sequence."""
    assert mask.ndim == 1, mask.shape
    assert mask.dtype == torch.bool, mask.dtype
    indices = mask.nonzero().squeeze(1)
    return Kept(indices, torch.searchsorted(indices, offsets.to(mask.device)))


def scatter(kept: Tensor, indices: Tensor, total: int) -> Tensor:
    """Write the (M) values to their indices in a tensor of (total) zeros."""
    return kept.new_zeros(total).index_copy_(0, indices, kept)


def segment_sum(values: Tensor, offsets: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum of each sequence, (N) to (B), accumulated in float64.

    The sum of an empty sequence is 0. The result has type `dtype`. If `dtype` is None, it is int64 for bools
    and integers, and the type of `values` otherwise.
    """
    offsets = offsets.to(values.device)
    if _numpy_can(values):
        sums = _numpy_sums(values, offsets)
    else:  # unsafe=True skips the check of the offsets, which would synchronise with the device
        sums = torch.segment_reduce(values.double(), "sum", offsets=offsets, unsafe=True)
    return sums.to(dtype or (values.dtype if values.is_floating_point() else torch.int64))


def segment_mean(values: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Return the mean of each sequence's masked values, (N) to (B); 0 without masked values."""
    counts = segment_sum(mask, offsets).clamp(min=1)
    return segment_sum(torch.where(mask, values, 0), offsets) / counts


def total(values: Tensor) -> Tensor:
    """Return the sum of all values, a float64 scalar, without a float64 copy of the values."""
    if _numpy_can(values):
        return torch.tensor(values.numpy().sum(dtype=np.float64))
    return values.sum(dtype=torch.float64)


def _numpy_can(values: Tensor) -> bool:
    """Return whether NumPy can sum these values, which is several times faster than PyTorch."""
    return values.device.type == "cpu" and not values.requires_grad and values.dtype != torch.bfloat16


def _numpy_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of each sequence, (B) float64.

    One tile at a time is converted to float64. This is faster than adding values of the original type, and
    the tile stays in the CPU cache.
    """
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
    """Return the maximum of each sequence's masked values, (N) to (B); 0 without masked values."""
    kept = torch.where(mask, values, -torch.inf)
    largest = torch.segment_reduce(kept, "max", offsets=offsets.to(values.device), unsafe=True)
    return torch.where(largest == -torch.inf, 0, largest)


def spread(per_sequence: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Repeat each sequence's number at its masked tokens, (B) to (N); 0 elsewhere."""
    lengths = offsets.to(mask.device).diff()
    if not _numpy_can(per_sequence):
        per_token = torch.repeat_interleave(per_sequence, lengths, output_size=len(mask))
        return per_token.masked_fill_(~mask, 0)
    per_token = torch.from_numpy(np.repeat(per_sequence.numpy(), lengths.numpy()))
    if not per_sequence.isfinite().all():
        return per_token.masked_fill_(~mask, 0)
    return zero_outside_(per_token, mask)


def zero_outside_(values: Tensor, mask: Tensor) -> Tensor:
    """Set finite values (N) outside the mask to 0, in place."""
    if not _numpy_can(values):
        return values.masked_fill_(~mask, 0)
    numbers = values.numpy()
    numbers *= mask.numpy()  # several times faster than masked_fill_, without a temporary tensor
    return values


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the masked tokens, a scalar; 0 without masked tokens."""
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Return the unbiased variance over the masked tokens, a scalar; 0 for fewer than two tokens."""
    squares = torch.where(mask, values - masked_mean(values, mask), 0).square()
    return squares.sum() / (mask.sum() - 1).clamp(min=1)


def whiten_(values: Tensor) -> Tensor:
    """Replace the values (M) by (x - mean) / sqrt(unbiased variance + 1e-8), in place.

    The mean is computed in float64, so that equal values become exactly 0. A single value becomes 0 too.
    """
    values.sub_(total(values) / max(len(values), 1))
    variance = torch.linalg.vector_norm(values).square() / max(len(values) - 1, 1)
    return values.mul_(torch.rsqrt(variance + 1e-8))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return 1 - Var(returns - values) / (Var(returns) + 1e-5), a scalar.

    The result is 1 for a perfect critic, 0 for a constant critic, and negative for a worse critic. The 1e-5
    keeps it finite if all returns are equal.
    """
    return 1 - masked_var(returns - values, mask) / (masked_var(returns, mask) + 1e-5)
