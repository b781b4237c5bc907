"""Each sequence's response tokens as one run, for what goes from token to token.

Shapes: N tokens of all sequences together, B sequences, M response tokens (N where none is moved).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.algorithms.masked import kept_tokens, scatter, total, whiten_, zero_outside_


@dataclass(frozen=True)
class Responses:
    """The response tokens of a batch, one after the other.

    Where each response is one run already, all tokens stay where they are and those around it are zeros:
    that spares the indices and half of the memory. Where tools wrote in between, they are moved together.

    Attributes:
        mask, outside: (N) bool, the response tokens and all others.
        offsets: (B+1) int64, where each sequence starts among the M.
        indices: (M) int64, where they stand among the N; None where they have not been moved.
    """

    mask: Tensor
    outside: Tensor
    offsets: Tensor
    indices: Tensor | None

    @classmethod
    def of(cls, mask: Tensor, offsets: Tensor) -> Responses:
        """The response tokens of a mask (N) over sequences."""
        offsets = offsets.to(mask.device)
        outside = ~mask
        begins = mask.clone()  # where a run begins: after no token that counts, or at a sequence's start
        begins[1:] &= outside[:-1]
        starts = offsets[:-1][offsets[:-1] < len(mask)]
        begins[starts] = mask[starts]
        sequence = torch.searchsorted(offsets, begins.nonzero().squeeze(1), right=True)
        if not bool((sequence.diff() == 0).any()):  # no sequence has two runs
            return cls(mask, outside, offsets, None)
        kept = kept_tokens(mask, offsets)
        return cls(mask, outside, kept.offsets, kept.indices)

    def take(self, column: Tensor) -> Tensor:
        """(N) to (M), a new tensor."""
        if self.indices is None:
            return torch.where(self.mask, column, 0)
        return column.index_select(0, self.indices)

    def add_(self, sums: Tensor, column: Tensor) -> Tensor:
        """Adds a column (N) to sums (M)."""
        if self.indices is None:
            return sums.add_(column).masked_fill_(self.outside, 0)
        return sums.add_(column.index_select(0, self.indices))

    def put(self, column: Tensor) -> Tensor:
        """(M) finite numbers to (N), zero outside the mask. Overwrites its argument where nothing need be
        moved."""
        if self.indices is None:
            return zero_outside_(column, self.mask)
        return scatter(column, self.indices, len(self.mask))

    def whitened(self, column: Tensor) -> Tensor:
        """(M) to (N): `whiten_` over the response tokens, zero elsewhere. Overwrites its argument."""
        if self.indices is not None:
            return self.put(whiten_(column))
        count = self.mask.count_nonzero()
        mean = total(self.put(column)) / count.clamp(min=1)
        self.put(column.sub_(mean))
        variance = torch.linalg.vector_norm(column).square() / (count - 1).clamp(min=1)
        return column.mul_(torch.rsqrt(variance + 1e-8))
