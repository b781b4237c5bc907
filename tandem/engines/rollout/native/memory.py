"""Functions that decide how much memory the KV cache of a rollout engine may use."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch

from tandem.engines.rollout.native.budget import CacheDemand
from tandem.engines.rollout.native.lasting import lasting_bytes
from tandem.engines.rollout.native.split import WHOLE, LayerSplit
from tandem.errors import EngineError
from tandem.memory.cache import DeviceMemory, LayerGroups, layer_groups
from tandem.memory.host import host_free, host_total

_SHARE_OF_CUDA, _SHARE_OF_HOST = 0.9, 0.5


@dataclass(slots=True)
class CacheRoom:
    """The memory budget of an engine's KV cache, counted in blocks.

    Attributes:
        device: The device of the cache.
        given: The fraction of the device's memory that the rollout may use (see `cache_budget`). None means
            0.9 on CUDA and 0.5 elsewhere. With None on CUDA, the cache may use the memory that training
            leaves free, allocates only what its sequences need, and frees it afterwards.
        block_size: The number of tokens per block.
        fixed: The number of blocks, set by the user. None means that the number depends on the memory.
        split: The split of the layers. All ranks of the split have caches of the same size, so they must
            decide together.
        weights: The bytes of the rollout engine's own weights.
        groups: The groups of layers that have their own block tables. A block that the user counts is one
            block in each table.
        memory: The CUDA device's memory when the budget was measured.
    """

    device: torch.device
    given: float | None
    block_size: int
    fixed: int | None = None
    split: LayerSplit = WHOLE
    weights: int = 0
    groups: LayerGroups = field(default_factory=lambda: layer_groups([0]))
    memory: DeviceMemory | None = None
    _budget: int | None = None

    @property
    def utilization(self) -> float:
        """Return the fraction of memory that the user set, or the device's default."""
        default = _SHARE_OF_CUDA if self.device.type == "cuda" else _SHARE_OF_HOST
        return default if self.given is None else self.given

    def most(self, per_block: int) -> int:
        """Return the maximum number of blocks of `per_block` bytes.

        The free memory is measured once. `forget` makes the next call measure it again.
        """
        if self.fixed is not None:
            return self.fixed * len(self.groups.windows)
        if self._budget is None:
            cuda = self.device.type == "cuda"
            self.memory = device_memory(self.device, self.weights) if cuda else None
            self._budget = self.split.smallest(cache_budget(self.device, self.utilization, self.weights))
        return self._budget // per_block

    def may_be_taken_again(self, blocks: int, per_block: int) -> bool:
        """Return whether a cache of `blocks` blocks that was freed may be allocated again.

        In the meantime this process may have allocated more memory for other purposes, such as the graphs
        that were captured over this cache. So the budget may be exceeded by up to half of the reserve.
        """
        size, most = blocks * per_block, self.most(per_block) * per_block
        slack = 0 if self.memory is None or self.fixed is not None else self.memory.reserved // 2
        return size <= most + slack and self.is_free(size)

    def copies_pay(self, size: int, wanted: CacheDemand | None, *, returned: bool) -> bool:
        """Return whether the rollout should have copies of a module's weights.

        The rollout should have copies only on CUDA, and only if there is enough memory now for the module and
        the copies. The copies must also leave enough memory for the cache's sequences. This last condition is
        dropped if the module's memory is freed after copying.

        Args:
            size: The bytes of the weights.
            wanted: The sequences that the cache must store. None if the cache may have any size.
            returned: Whether the module's memory is freed after copying.
        """
        if self.device.type != "cuda" or not self.is_free(size):
            return False
        now = device_memory(self.device, size)
        left = self.split.smallest(replace(now, held=now.held + size).cache(self.utilization))
        return returned or wanted is None or left >= wanted.bytes

    def wanted(self, pending: Collection[int], capacity: int, held: int, per_block: int) -> int:
        """Return how many blocks the pending requests can fill at the same time, limited by the budget.

        Args:
            pending: For each request, the number of blocks that it can fill.
            capacity: The maximum number of sequences that run at the same time.
            held: The current number of blocks. If the cache must grow, its size is at least doubled.
            per_block: The bytes of a block.

        Raises:
            EngineError: See `check_longest`.
        """
        longest, most = max(pending), self.most(per_block)
        self.check_longest(longest, per_block)
        if self.fixed is not None:
            return most
        blocks = min(sum(pending), capacity * longest, most)
        return blocks if blocks <= held else min(most, max(blocks, 2 * held))

    def forget(self) -> None:
        """Drop the measured budget, so that the next call of `most` measures it again."""
        self._budget = None

    def check_longest(self, longest: int, per_block: int) -> None:
        """Check that the longest sequence fits into the cache's budget.

        Args:
            longest: The number of blocks of the longest sequence.
            per_block: The bytes of a block. This value is ignored if the number of blocks is fixed.

        Raises:
            EngineError: The sequence needs more blocks than the cache can have.
        """
        most = self.most(per_block)
        if longest <= most:
            return
        tables = len(self.groups.windows)
        needed, got = f"{longest} blocks", f"{most} blocks"
        remedy = f"shorten sequences to {most // tables * self.block_size} tokens, or raise this key"
        if self.fixed is None:
            held = held_bytes(self.device)
            beside = f" in addition to the {_mib(held)} that this process already holds" if held else ""
            needed += f", {_mib(longest * per_block)}"
            got = f"{self.utilization}: {_mib(most * per_block)}{beside}"
            if not most:
                offloads = "fsdp_config.param_offload, optimizer_offload"
                remedy = f"raise this key, or offload other memory of this process: {offloads}"
        raise EngineError(
            "the cache is too small for one sequence",
            field=self._field,
            got=got,
            expected=f"{needed}, for the longest sequence",
            remedy=remedy,
        )

    def is_free(self, needed: int) -> bool:
        """Return whether `needed` bytes of memory are free now on all ranks."""
        return needed <= self.split.smallest(free_bytes(self.device))

    def check_free(self, needed: int) -> None:
        """Check that `needed` bytes of memory are free now on all ranks.

        Raises:
            EngineError: A rank has too little free memory.
        """
        free = self.split.smallest(free_bytes(self.device))
        if needed <= free:
            return
        also = "" if self.fixed is not None else " or actor_rollout_ref.rollout.max_num_seqs"
        raise EngineError(
            "there is not enough free memory for the KV cache",
            field=self._field,
            got=f"{_mib(free)} free",
            expected=_mib(needed),
            remedy=f"lower this key{also}, or stop other programs that use the device",
        )

    @property
    def _field(self) -> str:
        name = "gpu_memory_utilization" if self.fixed is None else "num_gpu_blocks_override"
        return f"actor_rollout_ref.rollout.{name}"


def cache_budget(device: torch.device, utilization: float, weights: int) -> int:
    """Return how many bytes the KV cache may use.

    On a CPU this is the fraction `utilization` of the machine's memory. On CUDA see `DeviceMemory`. The
    result must not depend on other processes. It determines how many sequences run together, and the exact
    bits of the log-probs depend on this number.

    Args:
        device: The device.
        utilization: The fraction of the device's memory that the rollout may use.
        weights: The bytes of the rollout engine's own weights.
    """
    if device.type == "cuda":
        return device_memory(device, weights).cache(utilization)
    return int(utilization * host_total())


def device_memory(device: torch.device, weights: int) -> DeviceMemory:
    """Return how the memory of a CUDA device is used now."""
    return DeviceMemory(torch.cuda.mem_get_info(device)[1], held_bytes(device), weights)


def held_bytes(device: torch.device) -> int:
    """Return how many bytes of the device this process uses for tensors. On a CPU the result is 0."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_allocated(device) + lasting_bytes(device)


def free_bytes(device: torch.device) -> int:
    """Return how many bytes of the device this process could allocate now."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return host_free()


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
