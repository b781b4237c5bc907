"""How much of a CUDA device the native rollout engine's cache gets, next to the state of training."""

from __future__ import annotations

import math
from dataclasses import dataclass

_RESERVED_SHARE = 20  # 1/20 of the device, but at least the next value
_RESERVED_LEAST = 2 * 2**30


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device in bytes, at the start of generation.

    Attributes:
        total: all memory of the device.
        held: memory that this process holds: what training keeps there, and the rollout's weights.
        weights: the rollout's weights, which are part of `held`.
    """

    total: int
    held: int
    weights: int

    @property
    def reserved(self) -> int:
        """Bytes kept free for the context, kernels, graphs, temporary results and allocator gaps."""
        return max(self.total // _RESERVED_SHARE, _RESERVED_LEAST)

    @property
    def beside(self) -> int:
        """Bytes that the cache can get next to everything that is held."""
        return max(0, self.total - self.held - self.reserved)

    def cache(self, utilization: float) -> int:
        """Return the bytes that the cache may get.

        The rollout is its weights, its cache and the reserve. Together they take at most the share
        `utilization` of the device, whatever training holds, and never more than is free.
        """
        share = int(utilization * self.total) - self.weights - self.reserved
        return max(0, min(share, self.beside))

    def utilization_for(self, cache: int) -> float:
        """Return the share with which the cache may get so many bytes, rounded up to 0.01."""
        return math.ceil(100 * (cache + self.weights + self.reserved) / self.total) / 100
