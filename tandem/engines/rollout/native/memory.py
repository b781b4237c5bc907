"""The memory that the cache may take."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from tandem.engines.rollout.native.budget import Wanted
from tandem.engines.rollout.native.lasting import lasting_bytes
from tandem.engines.rollout.native.split import WHOLE, LayerSplit
from tandem.errors import EngineError
from tandem.memory.cache import DeviceMemory
from tandem.memory.host import host_free, host_total

_SHARE_OF_CUDA, _SHARE_OF_HOST = 0.9, 0.5


@dataclass(slots=True)
class CacheRoom:
    """The number of blocks that the cache of an engine may have.

    Attributes:
        given: the share of the device's memory that the rollout may take, see `cache_budget`; None: 0.9 on
            CUDA, where the cache gets what training leaves, takes no more than its sequences need and gives
            it back when they are done; else 0.5.
        block_size: tokens per block.
        fixed: blocks, whatever the memory.
        split: whose ranks have caches of one size: each of their decisions is that of all.
        weights: bytes of the rollout's own weights.
        memory: of a CUDA device, when the budget was measured.
    """

    device: torch.device
    given: float | None
    block_size: int
    fixed: int | None = None
    split: LayerSplit = WHOLE
    weights: int = 0
    memory: DeviceMemory | None = None
    _budget: int | None = None

    @property
    def utilization(self) -> float:
        """The share that is given, or the device's default."""
        default = _SHARE_OF_CUDA if self.device.type == "cuda" else _SHARE_OF_HOST
        return default if self.given is None else self.given

    def most(self, per_block: int) -> int:
        """Blocks of `per_block` bytes, at most. The budget is measured once; see `forget`."""
        if self.fixed is not None:
            return self.fixed
        if self._budget is None:
            cuda = self.device.type == "cuda"
            self.memory = device_memory(self.device, self.weights) if cuda else None
            self._budget = self.split.smallest(cache_budget(self.device, self.utilization, self.weights))
        return self._budget // per_block

    def may_be_taken_again(self, blocks: int, per_block: int) -> bool:
        """Whether a cache of so many blocks, which was there before, may be so large still. What this process
        holds besides may have grown by half of what is left alone: the graphs over that cache have come."""
        size, most = blocks * per_block, self.most(per_block) * per_block
        slack = 0 if self.memory is None or self.fixed is not None else self.memory.reserved // 2
        return size <= most + slack and self.is_free(size)

    def copies_pay(self, size: int, wanted: Wanted | None, *, returned: bool) -> bool:
        """Whether the rollout should have copies of a module's weights: on CUDA, if there is memory for both
        now, and the copies leave the cache what its sequences need. Where the module's own memory is
        returned once they are made, they take none.

        Args:
            size: of the weights, bytes.
            wanted: the cache's sequences; None for a cache of whatever size.
            returned: whether the module's memory is returned.
        """
        if self.device.type != "cuda" or not self.is_free(size):
            return False
        now = device_memory(self.device, size)
        left = self.split.smallest(replace(now, held=now.held + size).cache(self.utilization))
        return returned or wanted is None or left >= wanted.bytes

    def wanted(self, pending: Collection[int], capacity: int, held: int, per_block: int) -> int:
        """As many blocks as the pending requests can fill at the same time, if there may be so many.

        Args:
            pending: blocks that each request can fill.
            capacity: sequences that run at the same time, at most.
            held: blocks there are; a cache that grows at least doubles.

        Raises:
            EngineError: see `check_longest`.
        """
        longest, most = max(pending), self.most(per_block)
        self.check_longest(longest, per_block)
        if self.fixed is not None:
            return self.fixed
        blocks = min(sum(pending), capacity * longest, most)
        return blocks if blocks <= held else min(most, max(blocks, 2 * held))

    def forget(self) -> None:
        """The budget is measured anew when it is next asked for."""
        self._budget = None

    def check_longest(self, longest: int, per_block: int) -> None:
        """
        Args:
            longest: blocks of one sequence.
            per_block: bytes of a block; of no meaning where their number is fixed.

        Raises:
            EngineError: they are more than the cache can have.
        """
        most = self.most(per_block)
        if longest <= most:
            return
        needed, got = f"{longest} blocks", f"{most} blocks"
        remedy = f"a sequence of {most * self.block_size} tokens would fit; or raise it"
        if self.fixed is None:
            held = held_bytes(self.device)
            beside = f" beside {_mib(held)} that this process holds already" if held else ""
            needed += f", {_mib(longest * per_block)}"
            got = f"{self.utilization}: {_mib(most * per_block)}{beside}"
            if not most:
                offloads = "fsdp_config.param_offload, optimizer_offload"
                remedy = f"raise it, or offload what this process holds: {offloads}"
        raise EngineError(
            "the cache is too small for one sequence",
            field=self._field,
            got=got,
            expected=f"{needed}, for {longest * self.block_size} tokens",
            remedy=remedy,
        )

    def is_free(self, needed: int) -> bool:
        """Whether that many bytes are free at this moment, on all ranks."""
        return needed <= self.split.smallest(free_bytes(self.device))

    def check_free(self, needed: int) -> None:
        """
        Raises:
            EngineError: that many bytes are not free at this moment on one of the ranks.
        """
        free = self.split.smallest(free_bytes(self.device))
        if needed <= free:
            return
        also = "" if self.fixed is not None else " or actor_rollout_ref.rollout.max_num_seqs"
        raise EngineError(
            "the memory that the KV cache may take is not free",
            field=self._field,
            got=f"{_mib(free)} free",
            expected=_mib(needed),
            remedy=f"lower it{also}, or end what else uses the memory",
        )

    @property
    def _field(self) -> str:
        name = "gpu_memory_utilization" if self.fixed is None else "num_gpu_blocks_override"
        return f"actor_rollout_ref.rollout.{name}"


def cache_budget(device: torch.device, utilization: float, weights: int) -> int:
    """Bytes the cache may take: on a host the share `utilization` of its memory, on CUDA see `DeviceMemory`.
    What other processes do must not decide how many sequences run side by side, for that decides the bits
    of their log-probs.

    Args:
        weights: bytes of the rollout's own weights.
    """
    if device.type == "cuda":
        return device_memory(device, weights).cache(utilization)
    return int(utilization * host_total())


def device_memory(device: torch.device, weights: int) -> DeviceMemory:
    """The memory of a CUDA device now."""
    return DeviceMemory(torch.cuda.mem_get_info(device)[1], held_bytes(device), weights)


def held_bytes(device: torch.device) -> int:
    """The bytes of the device that this process holds in tensors; 0 on a host, where it does not count."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_allocated(device) + lasting_bytes(device)


def free_bytes(device: torch.device) -> int:
    """The bytes of the device that this process could take now."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return host_free()


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
