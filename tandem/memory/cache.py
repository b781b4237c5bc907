"""The memory of a CUDA device that the native rollout engine's KV cache gets beside the training state."""

from __future__ import annotations

import math
from dataclasses import dataclass

_RESERVED_SHARE = 20  # 1/20 of the device, but at least `_RESERVED_LEAST`
_RESERVED_LEAST = 2 * 2**30


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The use of a device's memory at the start of generation, in bytes.

    Attributes:
        total: the whole memory of the device.
        held: memory that this process has allocated: the state of training, and the rollout's weights.
        weights: the rollout's weights, which are part of `held`.
    """

    total: int
    held: int
    weights: int

    @property
    def reserved(self) -> int:
        """Bytes reserved for the CUDA context, kernels, graphs, temporary tensors and fragmentation."""
        return max(self.total // _RESERVED_SHARE, _RESERVED_LEAST)

    @property
    def beside(self) -> int:
        """Bytes that are free for the cache beside `held` and the reserve."""
        return max(0, self.total - self.held - self.reserved)

    def cache(self, utilization: float) -> int:
        """Return the bytes that the KV cache may use.

        The rollout's weights, cache and reserve together use at most the fraction `utilization` of the
        device, independent of training. The cache never uses more than the free memory.
        """
        share = int(utilization * self.total) - self.weights - self.reserved
        return max(0, min(share, self.beside))

    def utilization_for(self, cache: int) -> float:
        """Return the `utilization` with which the cache may use `cache` bytes, rounded up to 0.01."""
        return math.ceil(100 * (cache + self.weights + self.reserved) / self.total) / 100
