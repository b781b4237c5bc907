import os

import pytest
import torch

from tandem.engines.rollout.native import memory
from tandem.errors import EngineError

CPU = torch.device("cpu")
GIB = 2**30
TOTAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Writes the kernel's files as a host with 8 GiB available and no limit would have them."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    return tmp_path


def limit(host, total, used, reclaimable):
    (host / "memory.max").write_text(f"{total}\n")
    (host / "memory.current").write_text(f"{used}\n")
    (host / "memory.stat").write_text(f"anon 1\ninactive_file {reclaimable}\n")


def test_the_budget_is_a_share_of_all_memory_whatever_is_free(host):
    assert memory.cache_budget(CPU, 0.25) == int(0.25 * TOTAL)
    (host / "meminfo").write_text("MemAvailable: 1 kB\n")
    assert memory.cache_budget(CPU, 0.25) == int(0.25 * TOTAL)


def test_a_containers_limit_binds(host):
    limit(host, GIB, GIB // 2, 0)
    assert memory.cache_budget(CPU, 0.5) == GIB // 2
    (host / "memory.max").write_text("max\n")
    assert memory.cache_budget(CPU, 0.5) == TOTAL // 2


def test_more_than_is_free_is_refused(host):
    memory.check_free(CPU, 8 * GIB)
    with pytest.raises(EngineError, match="8,192 MiB free"):
        memory.check_free(CPU, 8 * GIB + 1)
    limit(host, 6 * GIB, 5 * GIB, GIB)
    memory.check_free(CPU, 2 * GIB)
    with pytest.raises(EngineError, match="2,048 MiB free"):
        memory.check_free(CPU, 2 * GIB + 1)
