"""The choice of a device, its threads, and repeatable kernels."""

from __future__ import annotations

import os

import torch

from tandem.errors import ConfigError


def choose_device(name: str = "auto") -> torch.device:
    """The device this process computes on; under torchrun, the GPU of its LOCAL_RANK.

    Args:
        name: "cpu", "cuda", or "auto" for a GPU where there is one.

    Raises:
        ConfigError: an unknown name, or a device this machine does not have.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError("unknown device", field="trainer.device", got=name, expected="auto, cpu or cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= count:
        raise ConfigError(
            "this machine does not have that device",
            field="trainer.device",
            got=f"cuda:{index}",
            expected=f"one of {count} CUDA devices" if count else "a CUDA device; PyTorch sees none here",
            remedy="set trainer.device=cpu, or lower the number of processes per node",
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def set_threads(count: int | None) -> int:
    """Threads of CPU kernels; None keeps PyTorch's choice (OMP_NUM_THREADS, or one per core).

    Returns:
        The number now in force.

    Raises:
        ConfigError: a count below one.
    """
    if count is not None:
        if count < 1:
            raise ConfigError("threads below one", field="threads", got=count, expected=">= 1")
        torch.set_num_threads(count)
    return torch.get_num_threads()
