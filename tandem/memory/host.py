"""Functions that return the total and free memory of this host, or of this process's container."""

from __future__ import annotations

import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def host_total() -> int:
    """Return the bytes of the host's memory, or the container's limit if that is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, _cgroup_limit() or total)


def host_free() -> int:
    """Return the available bytes of the host's memory, within the container's limit.

    If the system does not report this number, return `host_total`.
    """
    free = _fields(MEMINFO, ":")["MemAvailable"] * 1024 if MEMINFO.exists() else host_total()
    limit = _cgroup_limit()
    if limit is None:
        return free
    used = int((CGROUP / "memory.current").read_text(encoding="utf-8"))
    reclaimable = _fields(CGROUP / "memory.stat", " ")["inactive_file"]
    return min(free, limit - used + reclaimable)


def _cgroup_limit() -> int | None:
    path = CGROUP / "memory.max"
    text = path.read_text(encoding="utf-8").strip() if path.exists() else "max"
    return None if text == "max" else int(text)


def _fields(path: Path, separator: str) -> dict[str, int]:
    """Parse a file of lines "NAME SEPARATOR NUMBER UNIT" into a dict from name to number."""
    pairs = (line.split(separator, 1) for line in path.read_text(encoding="utf-8").splitlines())
    return {name: int(value.split()[0]) for name, value in pairs}
