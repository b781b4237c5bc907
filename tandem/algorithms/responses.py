"""Move the response tokens of each sequence next to each other, for recurrences over tokens.

Shapes: N is the number of tokens of all sequences together, B the number of sequences, M the number of
response tokens (M = N if no token is moved).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.algorithms.masked import kept_tokens, scatter, total, whiten_, zero_outside_


@dataclass(frozen=True)
class Responses:
    """The response tokens of a batch, without gaps between tokens of the same sequence.

    If every response is already contiguous, no token is moved, and tokens outside of responses are set to 0.
    This case needs no indices and half of the memory. If there are tool outputs between response tokens, the
    response tokens are copied next to each other.

    Attributes:
        mask: (N) bool, the response tokens.
        outside: (N) bool, all other tokens.
        offsets: (B+1) int64, where each sequence starts among the M tokens.
        indices: (M) int64, the index of each response token among all N tokens; None if no token was moved.
    """

    mask: Tensor
    outside: Tensor
    offsets: Tensor
    indices: Tensor | None

    @classmethod
    def of(cls, mask: Tensor, offsets: Tensor) -> Responses:
        """Return a `Responses` for the tokens that a mask (N) selects."""
        offsets = offsets.to(mask.device)
        outside = ~mask
        begins = mask.clone()  # a run begins after a masked-out token, or at the start of a sequence
        begins[1:] &= outside[:-1]
        starts = offsets[:-1][offsets[:-1] < len(mask)]
        begins[starts] = mask[starts]
        sequence = torch.searchsorted(offsets, begins.nonzero().squeeze(1), right=True)
        if not bool((sequence.diff() == 0).any()):  # no sequence has two runs
            return cls(mask, outside, offsets, None)
        kept = kept_tokens(mask, offsets)
        return cls(mask, outside, kept.offsets, kept.indices)

    def take(self, column: Tensor) -> Tensor:
        """Return the response tokens of a column, (N) to (M), as a new tensor."""
        if self.indices is None:
            return torch.where(self.mask, column, 0)
        return column.index_select(0, self.indices)

    def add_(self, sums: Tensor, column: Tensor) -> Tensor:
        """Add a column (N) to `sums` (M) in place."""
        if self.indices is None:
            return sums.add_(column).masked_fill_(self.outside, 0)
        return sums.add_(column.index_select(0, self.indices))

    def put(self, column: Tensor) -> Tensor:
        """Write finite numbers (M) back to their tokens, (M) to (N); 0 outside the mask.

        If no token was moved, this overwrites its argument.
        """
        if self.indices is None:
            return zero_outside_(column, self.mask)
        return scatter(column, self.indices, len(self.mask))

    def whitened(self, column: Tensor) -> Tensor:
        """Apply `whiten_` over the response tokens, (M) to (N); 0 elsewhere. Overwrites its argument."""
        if self.indices is not None:
            return self.put(whiten_(column))
        count = self.mask.count_nonzero()
        mean = total(self.put(column)) / count.clamp(min=1)
        self.put(column.sub_(mean))
        variance = torch.linalg.vector_norm(column).square() / (count - 1).clamp(min=1)
        return column.mul_(torch.rsqrt(variance + 1e-8))
