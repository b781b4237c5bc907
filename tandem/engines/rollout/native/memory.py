"""How much memory the cache may take."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tandem.engines.rollout.native.paged import PagedCache
from tandem.errors import EngineError

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def cache_budget(device: torch.device, utilization: float) -> int:
    """Bytes the cache may take: the share `utilization` of all memory of the device, less what this
    process holds of it on CUDA. What other processes do must not decide how many sequences run side by
    side, for that decides the bits of their log-probs."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        return max(0, int(utilization * total) - torch.cuda.memory_allocated(device))
    return int(utilization * _host_total())


def check_free(device: torch.device, needed: int) -> None:
    """
    Raises:
        EngineError: that many bytes are not free at this moment.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = _host_free()
    if needed > free:
        raise EngineError(
            "the memory that the KV cache may take is not free",
            field="actor_rollout_ref.rollout.gpu_memory_utilization",
            got=f"{free / 2**20:,.0f} MiB free",
            expected=f"{needed / 2**20:,.0f} MiB",
            remedy="lower it or actor_rollout_ref.rollout.max_num_seqs, or end what else uses the memory",
        )


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
    """What is available, within a container's limit; all there is where the system gives no figure."""
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
