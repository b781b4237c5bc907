"""Weights on their way from training to generation, and the digests that prove they arrived."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Digest = dict[str, int]
"""Hugging Face name → sum of the tensor's bit patterns modulo 2^64. Additive: the digest of a tensor is
the sum of those of its shards, and that of fused tensors the sum of their parts'."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensors: Iterable[tuple[str, Tensor]]) -> Digest:
    """Digests of tensors, by name; on a device, one transfer for all of them."""
    names, sums = [], []
    for name, tensor in tensors:
        names.append(name)
        sums.append(tensor.detach().contiguous().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64))
    return dict(zip(names, torch.stack(sums).tolist(), strict=True)) if sums else {}
