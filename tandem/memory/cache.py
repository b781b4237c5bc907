"""The share of a CUDA device that the native rollout's cache gets beside training's state."""

from __future__ import annotations

import math
from dataclasses import dataclass

_RESERVED_SHARE = 20  # a twentieth of the device, and at least
_RESERVED_LEAST = 2 * 2**30


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device in bytes, when generation begins.

    Attributes:
        total: all there is.
        held: by this process: what training leaves there, and the rollout's weights.
        weights: the rollout's, of `held`.
    """

    total: int
    held: int
    weights: int

    @property
    def reserved(self) -> int:
        """Left alone: the context, compiled kernels, graphs, what a step computes, the allocator's gaps."""
        return max(self.total // _RESERVED_SHARE, _RESERVED_LEAST)

    @property
    def beside(self) -> int:
        """What the cache can have beside all that is held."""
        return max(0, self.total - self.held - self.reserved)

    def cache(self, utilization: float) -> int:
        """What the cache may have: the rollout, which is its weights, its cache and the reserve, takes the
        share `utilization` of the device at most, whatever training holds, and no more than is there beside
        that."""
        share = int(utilization * self.total) - self.weights - self.reserved
        return max(0, min(share, self.beside))

    def utilization_for(self, cache: int) -> float:
        """The share with which the cache may have so many bytes, rounded up to a hundredth."""
        return math.ceil(100 * (cache + self.weights + self.reserved) / self.total) / 100
