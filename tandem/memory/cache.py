"""The memory of the native rollout engine's KV cache: how much it gets, and what a sequence takes of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
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


_MOST_GROUPS = 8  # more groups mean more block tables in each step


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """A division of a model's layers into groups with the same window.

    A block of the cache stores some tokens for the layers of one group. Each sequence has one block table per
    group. All groups take their blocks from the same pool, so each block has room for the largest group. The
    blocks that lie behind a window are given back.

    Attributes:
        windows: for each group, how many of the last tokens its layers need; 0: all tokens.
        places: for each layer, its group and its place among the layers of the group.
        size: the number of layers of the largest group.
    """

    windows: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    size: int

    def blocks(self, tokens: int, step: int, block_size: int) -> int:
        """Return the number of blocks that a sequence takes at most.

        Args:
            tokens: number of tokens of the sequence.
            step: number of the sequence's tokens that are computed at once.
            block_size: number of tokens per block.
        """
        whole = -(-tokens // block_size)
        return sum(
            min(whole, -(-(window + step) // block_size) + 1) if window else whole for window in self.windows
        )


def layer_groups(windows: Sequence[int]) -> LayerGroups:
    """Divide layers into groups, given the window of each layer; 0: no window.

    A group has as many layers as the rarest window, so that no room is left empty there. But there are about
    8 groups at most.
    """
    counts = Counter(windows)
    size = len(windows) if len(counts) == 1 else max(min(counts.values()), -(-len(windows) // _MOST_GROUPS))
    first, begun = dict[int, int](), list[int]()
    for window, count in counts.items():
        first[window] = len(begun)
        begun += [window] * -(-count // size)
    seen, places = Counter[int](), []
    for window in windows:
        group, place = divmod(seen[window], size)
        places.append((first[window] + group, place))
        seen[window] += 1
    return LayerGroups(tuple(begun), tuple(places), size)
