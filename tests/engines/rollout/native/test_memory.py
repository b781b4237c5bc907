import os

import pytest
import torch

from tandem.engines.rollout.native import memory
from tandem.engines.rollout.native.budget import CacheDemand, cache_message, weights_message
from tandem.engines.rollout.native.memory import CacheRoom
from tandem.engines.rollout.native.split import LayerSplit
from tandem.errors import EngineError
from tandem.memory import host as host_memory
from tandem.memory.cache import DeviceMemory
from tests.engines.rollout.case import CPU
from tests.support.refusing import refused

CUDA = torch.device("cuda", 0)
GIB = 2**30
TOTAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
KEYS = "actor_rollout_ref.rollout."


@pytest.fixture
def host(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    monkeypatch.setattr(host_memory, "MEMINFO", meminfo)
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    return tmp_path


@pytest.fixture
def cuda(monkeypatch):
    at = {"total": 80, "held": 20, "others": 0}
    free = lambda _: ((at["total"] - at["held"] - at["others"]) * GIB, at["total"] * GIB)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    for name in ("memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda _: at["held"] * GIB)
    return at


def limit(host, total, used, reclaimable):
    (host / "memory.max").write_text(f"{total}\n")
    (host / "memory.current").write_text(f"{used}\n")
    (host / "memory.stat").write_text(f"anon 1\ninactive_file {reclaimable}\n")


def test_the_budget_is_a_share_of_all_memory_whatever_is_free_up_to_a_containers_limit(host):
    assert memory.cache_budget(CPU, 0.25, 0) == int(0.25 * TOTAL)
    (host / "meminfo").write_text("MemAvailable: 1 kB\n")
    assert memory.cache_budget(CPU, 0.25, 0) == int(0.25 * TOTAL)
    limit(host, GIB, GIB // 2, 0)
    assert memory.cache_budget(CPU, 0.5, 0) == GIB // 2
    (host / "memory.max").write_text("max\n")
    assert memory.cache_budget(CPU, 0.5, 0) == TOTAL // 2


def test_more_than_is_free_is_refused(host):
    room = CacheRoom(CPU, 0.5, 16)
    room.check_free(8 * GIB)
    assert room.is_free(8 * GIB) and not room.is_free(8 * GIB + 1)
    error = refused(EngineError, lambda: room.check_free(8 * GIB + 1), r"8,192.0 MiB free")
    assert error.field == KEYS + "gpu_memory_utilization" and "max_num_seqs" in error.remedy
    limit(host, 6 * GIB, 5 * GIB, GIB)
    room.check_free(2 * GIB)
    refused(EngineError, lambda: room.check_free(2 * GIB + 1), r"2,048.0 MiB free")
    fixed = CacheRoom(CPU, 0.5, 16, fixed=10**9)
    error = refused(EngineError, lambda: fixed.check_free(10**9 * GIB))
    assert error.field == KEYS + "num_gpu_blocks_override"
    assert "stop other programs" in error.remedy and "max_num_seqs" not in error.remedy


@pytest.mark.parametrize(("asked", "rows", "held", "wanted"), [
    ([3, 4, 5], 10, 0, 12), ([3, 4, 5], 2, 0, 10), ([60, 70], 10, 0, 100), ([3, 4, 5], 10, 11, 22),
    ([3, 4, 5], 10, 12, 12), ([60, 70], 10, 90, 100),
])  # fmt: skip
def test_as_many_blocks_as_are_asked_for_or_may_be_had(monkeypatch, asked, rows, held, wanted):
    monkeypatch.setattr(memory, "cache_budget", lambda device, share, weights: 100 * 7)
    assert CacheRoom(CPU, 0.5, 16).wanted(asked, rows, held, per_block=7) == wanted
    assert CacheRoom(CPU, 0.5, 16, fixed=33).wanted([3, 4], 10, 0, per_block=7) == 33
    refused(EngineError, lambda: CacheRoom(CPU, 0.5, 16).wanted([3, 101], 10, 0, per_block=7), "1600 tokens")


def test_a_device_full_of_the_process_itself_says_so(cuda):
    cuda |= {"total": 40, "held": 39}
    with pytest.raises(EngineError, match=r"0.5: 0.0 MiB .*39,936.0 MiB that this process") as caught:
        CacheRoom(CUDA, 0.5, 16).check_longest(4, 2**20)
    assert caught.value.field == KEYS + "gpu_memory_utilization"
    assert "shorten" not in caught.value.remedy and "param_offload" in caught.value.remedy


def test_all_ranks_decide_by_the_one_with_least(host):
    class Least(LayerSplit):
        def smallest(self, value):
            return min(value, GIB)

    room = CacheRoom(CPU, 0.5, 16, split=Least(0, 2))
    assert room.is_free(GIB) and not room.is_free(GIB + 1)
    refused(EngineError, lambda: room.check_free(GIB + 1), r"1,024.0 MiB free")
    assert room.most(2**20) == 1024


def test_on_cuda_the_cache_gets_what_training_leaves(cuda):
    room = CacheRoom(CUDA, None, 16, weights=3 * GIB)
    assert room.most(GIB) == 80 - 20 - 4
    cuda["held"] = 5
    assert room.most(GIB) == 56  # measured once
    room.forget()
    assert room.most(GIB) == CacheRoom(CUDA, 0.9, 16, weights=3 * GIB).most(GIB) == 72 - 3 - 4
    assert CacheRoom(CUDA, 0.5, 16, weights=3 * GIB).most(GIB) == 40 - 3 - 4


def test_copies_of_weights_are_made_where_they_leave_the_cache_its_need(cuda):
    room, wanted = CacheRoom(CUDA, None, 16), CacheDemand(52, 160, 10, GIB // 10)
    assert wanted.bytes <= 52 * GIB < wanted.bytes + GIB
    assert room.copies_pay(4 * GIB, wanted, returned=False)  # 80 - 20 - 4 - 4 = 52
    assert not room.copies_pay(5 * GIB, wanted, returned=False)
    assert room.copies_pay(5 * GIB, wanted, returned=True) and room.copies_pay(5 * GIB, None, returned=False)
    cuda["others"] = 56
    assert not room.copies_pay(5 * GIB, wanted, returned=True)
    assert not CacheRoom(CPU, None, 16).copies_pay(1, None, returned=True)


def test_a_cache_is_taken_again_although_graphs_have_come(cuda):
    room = CacheRoom(CUDA, None, 16)
    assert room.most(GIB) == 56
    for cuda["held"], may in ((21, True), (22, True), (23, False)):
        room.forget()
        assert room.may_be_taken_again(56, GIB) == may
    fixed = CacheRoom(CPU, 0.5, 16, fixed=7)
    assert fixed.may_be_taken_again(7, 1) and not fixed.may_be_taken_again(8, 1)


PARAMETERS = 1_543_714_304  # Qwen2.5-1.5B
PER_TOKEN = 28 * 2 * 2 * 128 * 2  # 28 layers, keys and values of 2 heads of 128, bf16
H100 = 85_029_158_912  # bytes that the driver reports for an 80 GB device
NEED = CacheDemand(256, 7680, 480, 16 * PER_TOKEN)


def trained(parameter_bytes, total=H100):
    weights = 2 * PARAMETERS
    return DeviceMemory(total, parameter_bytes * PARAMETERS + weights, weights)


def told(memory, utilization):
    return cache_message(NEED, memory.cache(utilization) // (16 * PER_TOKEN), memory, utilization)


def test_the_share_counts_what_the_rollout_holds_alone_and_takes_no_more_than_is_there():
    assert trained(0).cache(0.5) == trained(12).cache(0.5) == int(0.5 * H100) - 2 * PARAMETERS - H100 // 20
    memory = trained(30)
    assert memory.cache(0.9) == memory.cache(1.0) == H100 - 32 * PARAMETERS - H100 // 20
    assert DeviceMemory(10 * GIB, 9 * GIB, GIB).cache(1.0) == 0
    assert DeviceMemory(10 * GIB, 1 * GIB, GIB).cache(1.0) == 7 * GIB  # 2 GiB are reserved


def test_a_share_that_is_too_small_is_told_with_the_one_that_is_not():
    """By default, 256 sequences fit beside fp32 weights and Adam."""
    memory = trained(12)
    assert NEED.bytes == 256 * 7680 * 28 * 1024 == 52.5 * GIB <= memory.cache(0.9)
    text = told(memory, 0.9)
    assert text.startswith("cache: 52.5 GiB, enough for 256 sequences of 7,680 tokens at a time")
    assert text.endswith("which is max_num_seqs")
    text = told(memory, 0.5)
    assert "cache: 32.8 GiB" in text and "159 sequences of 7,680" in text and "max_num_seqs is 256" in text
    remedy = float(text.rsplit(" ", 1)[1])
    assert text.endswith(f"; raise gpu_memory_utilization to {remedy}")
    assert memory.cache(remedy) >= NEED.bytes > memory.cache(remedy - 0.01)


def test_what_training_holds_is_named_where_it_is_in_the_way():
    memory = trained(16)  # with a reference model too
    text, lacking = told(memory, 0.9), NEED.bytes - memory.beside
    assert 0 < lacking < 16 * PARAMETERS
    assert f"free {lacking / GIB:.1f} GiB of the {16 * PARAMETERS / GIB:.1f} GiB" in text
    assert "optimizer_offload" in text and "max_num_seqs is 256" in text and "raise" not in text
    low = told(memory, 0.6)
    assert f"free {lacking / GIB:.1f} GiB" in low
    assert low.endswith(" and raise gpu_memory_utilization to 0.75")
    freed = DeviceMemory(H100, memory.held - lacking, memory.weights)
    assert freed.cache(freed.utilization_for(NEED.bytes)) >= NEED.bytes


def test_what_no_share_can_hold_and_a_number_of_blocks_set_by_hand_are_told():
    text = told(trained(0, 24 * GIB), 0.9)
    most = (24 * GIB - 2 * PARAMETERS - 2 * GIB) // (480 * 16 * PER_TOKEN)
    assert f"can hold at most {most}" in text and "more devices" in text
    text = cache_message(CacheDemand(8, 100, 7, 16 * PER_TOKEN), 20, None, 0.9)
    assert "2 sequences of 100 tokens" in text and "max_num_seqs is 8" in text
    assert text.endswith("raise num_gpu_blocks_override")


@pytest.mark.parametrize(("copies", "found"), [(True, "packed copies, 2.9 GiB"), (False, "model itself")])
def test_the_weights_are_told(copies, found):
    assert found in weights_message(2 * PARAMETERS, copies=copies)
