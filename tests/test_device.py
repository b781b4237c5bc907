import os

import pytest
import torch

from tandem.device import apart, choose_device, set_threads, to_device, together
from tandem.errors import ConfigError


def test_unknown_device():
    with pytest.raises(ConfigError, match="tpu") as caught:
        choose_device("tpu")
    assert caught.value.field == "trainer.device"


def test_absent_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="cuda:0") as caught:
        choose_device("cuda")
    assert "trainer.device=cpu" in caught.value.remedy
    assert choose_device("auto") == torch.device("cpu")


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("auto") == torch.device("cuda", 1)
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="one of 2 CUDA devices"):
        choose_device("cuda")


def test_threads():
    before = torch.get_num_threads()
    try:
        assert set_threads(None) == before
        assert set_threads(1) == torch.get_num_threads() == 1
        with pytest.raises(ConfigError):
            set_threads(0)
    finally:
        torch.set_num_threads(before)


TENSORS = [
    torch.arange(7, dtype=torch.int32),
    torch.tensor([True, False, True]),
    torch.linspace(0, 1, 10, dtype=torch.float64).view(5, 2),
    torch.empty(0, dtype=torch.int64),
    torch.tensor(2.5),
    torch.arange(12, dtype=torch.bfloat16).view(3, 4).T,
]


@pytest.mark.parametrize("count", range(len(TENSORS) + 1))
def test_tensors_travel_together_and_come_apart_as_they_were(count):
    tensors = TENSORS[:count]
    joined = together(tensors)
    assert joined.dtype == torch.uint8 and len(joined) >= sum(tensor.nbytes for tensor in tensors)
    for found, wanted in zip(apart(joined, tensors), tensors, strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
        assert found.data_ptr() % 16 == joined.data_ptr() % 16 or found.numel() == 0


def test_on_the_host_nothing_is_copied():
    found = to_device(TENSORS, torch.device("cpu"))
    assert all(tensor is same for tensor, same in zip(found, TENSORS, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gets_them_in_one_copy_without_a_wait():
    cuda = torch.device("cuda", 0)
    there = torch.ones(3, device=cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = to_device([*TENSORS, there], cuda)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found[-1] is there
    assert len({tensor.untyped_storage().data_ptr() for tensor in found[:-1]}) == 1
    assert all(torch.equal(tensor.cpu(), same) for tensor, same in zip(found, TENSORS, strict=False))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_runs_kernels_that_are_compiled():
    """The kernels are not interpreted. Other tests interpret them if there is no GPU."""
    assert "TRITON_INTERPRET" not in os.environ
