"""Choose a device, set the number of CPU threads, and copy data between host and device."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.errors import ConfigError

_ALIGNMENT = 16  # bytes; enough for every data type


def choose_device(name: str = "auto") -> torch.device:
    """Return the device that this process computes on. Under torchrun, a GPU is selected by LOCAL_RANK.

    Args:
        name: "cpu", "cuda", or "auto" for a GPU if there is one.

    Raises:
        ConfigError: the name is unknown, or this machine does not have the device.
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
    """Set the number of OpenMP threads of CPU kernels that the calling thread uses.

    Use this function instead of `torch.set_num_threads`. That function also turns MKL's dynamic threading
    off, now and whenever another thread uses PyTorch for the first time. MKL then looks for threads in each
    small product inside a parallel kernel: attention on two cores takes 1.3 times as long.

    In a thread that works at the same time as the training thread, first call this function with 1. If both
    threads have OpenMP threads, there are more OpenMP threads than cores. Waiting OpenMP threads then sleep
    at once, and each kernel of training has to wake them up.

    Args:
        count: number of threads; None keeps PyTorch's choice (OMP_NUM_THREADS, or one per core).

    Returns:
        The number of threads now.

    Raises:
        ConfigError: the count is below one.
    """
    before = torch.get_num_threads()  # the first call makes PyTorch set this thread's number
    if count is None:
        return before
    if count < 1:
        raise ConfigError("must be at least one", field="threads", got=count, expected=">= 1")
    library = ctypes.CDLL(torch._C.__file__)
    if hasattr(library, "omp_set_num_threads"):
        library.omp_set_num_threads(count)
    else:  # this PyTorch does not use OpenMP
        torch.set_num_threads(count)
    return torch.get_num_threads()


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on `device`.

    All tensors go from the host to a GPU in one copy from pinned memory. The host does not wait for it. The
    tensors then share one storage.
    """
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    sent = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    arrived = iter(apart(together(sent, pinned=True).to(device, non_blocking=True), sent))
    return [next(arrived) if tensor.device.type == "cpu" else tensor.to(device) for tensor in tensors]


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Start to copy an array to the device, and return the tensor without waiting for the copy.

    The copy is ordered with the other work of the device. On a CPU the result is the array itself, which
    must not change afterwards.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy from unpinned memory would make the host wait
    return tensor.to(device, non_blocking=True)


def together(tensors: Sequence[Tensor], *, pinned: bool = False) -> Tensor:
    """Return the bytes of host tensors as one uint8 tensor. Each tensor starts at a multiple of 16 bytes."""
    places = _places(tensors)
    out = torch.empty(places[-1].stop if places else 0, dtype=torch.uint8, pin_memory=pinned)
    for tensor, piece in zip(tensors, apart(out, tensors), strict=True):
        piece.copy_(tensor)
    return out


def apart(joined: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the result of `together`, with the types and shapes of its `tensors`."""
    return [
        joined[place].view(tensor.dtype).view(tensor.shape)
        for tensor, place in zip(tensors, _places(tensors), strict=True)
    ]


def _places(tensors: Sequence[Tensor]) -> list[slice]:
    places, start = [], 0
    for tensor in tensors:
        places.append(slice(start, start + tensor.nbytes))
        start += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places


def memory_use(device: torch.device) -> dict[str, int]:
    """Return the memory use of a GPU in bytes; empty for a CPU.

    Keys: "total"; "used" by all processes; "reserved" by PyTorch's allocator in this process; and
    "allocated" by this allocator.
    """
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    return {"total": total, "used": total - free, "reserved": reserved, "allocated": allocated}
