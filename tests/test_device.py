import pytest
import torch

from tandem.device import choose_device, set_threads
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
