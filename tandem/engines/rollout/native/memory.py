"""How much memory the cache may take."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def cache_budget(device: torch.device, utilization: float) -> int:
    """Bytes the cache may take: on CUDA the share `utilization` of the device's memory, less what is in
    use and never more than is free; on a host that share of the memory available now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(0, min(int(utilization * total) - (total - free), free))
    return int(utilization * _host_available())


def _host_available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        available = _fields(meminfo, ":")["MemAvailable"] * 1024
    else:  # no figure for what is available: half of what there is
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    limit = _CGROUP / "memory.max"
    if limit.exists() and limit.read_text().strip() != "max":
        used = int((_CGROUP / "memory.current").read_text())
        reclaimable = _fields(_CGROUP / "memory.stat", " ")["inactive_file"]
        available = min(available, int(limit.read_text()) - used + reclaimable)
    return max(available, 0)


def _fields(path: Path, separator: str) -> dict[str, int]:
    """Lines of a name, the separator and a number (a unit may follow)."""
    pairs = (line.split(separator, 1) for line in path.read_text().splitlines())
    return {name: int(value.split()[0]) for name, value in pairs}
