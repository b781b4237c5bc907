"""The memory that the cache may take."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.engines.rollout.native.paged import PagedCache
from tandem.engines.rollout.native.split import WHOLE, LayerSplit
from tandem.errors import EngineError

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(slots=True)
class CacheRoom:
    """The number of blocks that the cache of an engine may have.

    Attributes:
        utilization: the share of the device's memory that the cache may take; see `cache_budget`.
        block_size: tokens per block.
        fixed: blocks, whatever the memory.
        split: whose ranks have caches of one size: each of their decisions is that of all.
    """

    device: torch.device
    utilization: float
    block_size: int
    fixed: int | None = None
    split: LayerSplit = WHOLE
    _budget: int | None = None

    def most(self, per_block: int) -> int:
        """Blocks of `per_block` bytes, at most. The budget is measured once; see `forget`."""
        if self.fixed is not None:
            return self.fixed
        if self._budget is None:
            self._budget = self.split.smallest(cache_budget(self.device, self.utilization))
        return self._budget // per_block

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

    def check_longest(self, longest: int, per_block: int | None) -> None:
        """
        Args:
            longest: blocks of one sequence.
            per_block: bytes of a block; None where the model is not yet known.

        Raises:
            EngineError: they are more than the cache can have.
        """
        if self.fixed is None and per_block is None:
            return
        most = self.most(per_block or 0)
        if longest <= most:
            return
        needed = f"{longest} blocks"
        got = f"{most} blocks"
        remedy = f"a sequence of {most * self.block_size} tokens would fit; or raise it"
        if self.fixed is None and per_block is not None:
            held = held_bytes(self.device)
            needed += f", {_mib(longest * per_block)}"
            got = f"{self.utilization}: {_mib(most * per_block)}"
            if held:
                got += f" beside {_mib(held)} that this process holds already"
            if not most:
                remedy = "raise it; it counts what this process holds of the device, the model above all"
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


def cache_budget(device: torch.device, utilization: float) -> int:
    """Bytes the cache may take: the share `utilization` of all memory of the device, less what this
    process holds of it on CUDA. What other processes do must not decide how many sequences run side by
    side, for that decides the bits of their log-probs."""
    if device.type == "cuda":
        return max(0, int(utilization * torch.cuda.mem_get_info(device)[1]) - held_bytes(device))
    return int(utilization * _host_total())


def held_bytes(device: torch.device) -> int:
    """The bytes of the device that this process holds in tensors; 0 on a host, where it does not count."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def free_bytes(device: torch.device) -> int:
    """The bytes of the device that this process could take now."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - held_bytes(device)
    return _host_free()


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def grown(cache: PagedCache, blocks: int) -> PagedCache:
    """A cache of more blocks that begins with this one's content."""
    out = PagedCache(cache.layers, blocks, cache.block_size, cache.dtype, cache.device)
    for new, old in zip((*out.keys, *out.values), (*cache.keys, *cache.values), strict=True):
        new[: cache.blocks] = old
    return out


def _host_total() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, _cgroup_limit() or total)


def _host_free() -> int:
    """The bytes that are available, within a container's limit; all there is where the system gives no
    figure."""
    free = _fields(_MEMINFO, ":")["MemAvailable"] * 1024 if _MEMINFO.exists() else _host_total()
    limit = _cgroup_limit()
    if limit is None:
        return free
    used = int((_CGROUP / "memory.current").read_text())
    reclaimable = _fields(_CGROUP / "memory.stat", " ")["inactive_file"]
    return min(free, limit - used + reclaimable)


def _cgroup_limit() -> int | None:
    path = _CGROUP / "memory.max"
    text = path.read_text().strip() if path.exists() else "max"
    return None if text == "max" else int(text)


def _fields(path: Path, separator: str) -> dict[str, int]:
    """Lines of a name, the separator and a number (a unit may follow)."""
    pairs = (line.split(separator, 1) for line in path.read_text().splitlines())
    return {name: int(value.split()[0]) for name, value in pairs}
