"""Tests of the cache's share of a device, and of the message about it."""

import pytest

from tandem.engines.rollout.native.budget import CacheDemand, cache_message, weights_message
from tandem.memory.cache import DeviceMemory

GIB = 2**30
PARAMETERS = 1_543_714_304  # Qwen2.5-1.5B
PER_TOKEN = 28 * 2 * 2 * 128 * 2  # 28 layers, keys and values of 2 heads of 128, bf16
H100 = 85_029_158_912  # bytes that the driver reports for an 80 GB device
NEED = CacheDemand(256, 7680, 480, 16 * PER_TOKEN, 16)


def trained(parameter_bytes: int, total: int = H100) -> DeviceMemory:
    """Return a device that holds the training state and the rollout's bf16 copy."""
    weights = 2 * PARAMETERS
    return DeviceMemory(total, parameter_bytes * PARAMETERS + weights, weights)


def told(memory: DeviceMemory, utilization: float) -> str:
    return cache_message(NEED, memory.cache(utilization) // (16 * PER_TOKEN), memory, utilization)


def test_the_share_counts_what_the_rollout_holds_alone_and_takes_no_more_than_is_there():
    assert trained(0).cache(0.5) == trained(12).cache(0.5) == int(0.5 * H100) - 2 * PARAMETERS - H100 // 20
    memory = trained(30)
    assert memory.cache(0.9) == memory.cache(1.0) == H100 - 32 * PARAMETERS - H100 // 20
    assert DeviceMemory(10 * GIB, 9 * GIB, GIB).cache(1.0) == 0
    assert DeviceMemory(10 * GIB, 1 * GIB, GIB).cache(1.0) == 7 * GIB  # 2 GiB are reserved


def test_256_sequences_fit_by_default_beside_fp32_weights_and_adam():
    memory = trained(12)
    assert NEED.bytes == 256 * 7680 * 28 * 1024 == 52.5 * GIB <= memory.cache(0.9)
    text = told(memory, 0.9)
    assert text.startswith("cache: 1,966,080 tokens (52.5 GiB)") and text.endswith("which is max_num_seqs")
    assert "256 sequences of 7,680 tokens" in text


def test_a_share_that_is_too_small_is_told_with_the_one_that_is_not():
    memory = trained(12)
    text = told(memory, 0.5)
    assert text.startswith("cache: 1,2")
    assert "159 sequences of 7,680" in text and "max_num_seqs is 256" in text
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


def test_what_no_share_can_hold_is_told():
    text = told(trained(0, 24 * GIB), 0.9)
    most = (24 * GIB - 2 * PARAMETERS - 2 * GIB) // (480 * 16 * PER_TOKEN)
    assert f"can hold at most {most}" in text and "more devices" in text


def test_a_number_of_blocks_set_by_hand():
    text = cache_message(CacheDemand(8, 100, 7, 16 * PER_TOKEN, 16), 20, None, 0.9)
    assert "2 sequences of 100 tokens" in text and "max_num_seqs is 8" in text
    assert text.endswith("raise num_gpu_blocks_override")


@pytest.mark.parametrize(("copies", "found"), [(True, "packed copies, 2.9 GiB"), (False, "model itself")])
def test_the_weights_are_told(copies, found):
    assert found in weights_message(2 * PARAMETERS, copies=copies)
