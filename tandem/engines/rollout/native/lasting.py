"""Device memory that is given back and taken again at the same addresses, so that the CUDA graphs which read
and write there stay good. PyTorch's allocator hands out other addresses each time, and does not count this
memory; see `lasting_bytes`."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from tandem.engines.rollout.native.driver import CHUNK, MAPPINGS, Driver, DriverError, Mapping
from tandem.errors import EngineError

_ALIGNMENT = 256  # bytes, of each tensor

Spec = tuple[Sequence[int], torch.dtype]
"""Shape and type of a tensor."""


class Region(Protocol):
    """Bytes at fixed addresses.

    Attributes:
        buffer: uint8, all of them; it must not be touched between `give_back` and `take`.
    """

    buffer: Tensor

    def give_back(self) -> None:
        """Returns the memory, and what stood there with it, once the device has done all it was asked."""

    def take(self) -> None:
        """Takes memory again, of whatever content.

        Raises:
            EngineError: there is not enough.
        """


class Lasting:
    """Tensors in one piece of memory, which stays where it is if the device offers a `Region`.

    Args:
        specs: of the tensors.

    Attributes:
        tensors: of whatever content at first.
        stays: whether the memory can be given back and taken again in the same place.
        bytes: of all of them.
    """

    def __init__(self, specs: Sequence[Spec], device: torch.device) -> None:
        starts, end = [], 0
        for shape, dtype in specs:
            starts.append(end)
            end += -(-_size(shape, dtype) // _ALIGNMENT) * _ALIGNMENT
        self.bytes = end
        self._region = reserve(end, device)
        self.stays = self._region is not None
        self._held = True
        buffer = (
            torch.empty(end, dtype=torch.uint8, device=device)
            if self._region is None
            else self._region.buffer
        )
        self.tensors = [
            buffer[start : start + _size(shape, dtype)].view(dtype).view(tuple(shape))
            for start, (shape, dtype) in zip(starts, specs, strict=True)
        ]

    def give_back(self) -> None:
        """Returns the memory, which must be such as stays."""
        assert self._region is not None
        if self._held:
            self._region.give_back()
        self._held = False

    def take(self) -> None:
        """Takes the memory again if it was given back.

        Raises:
            EngineError: there is not enough.
        """
        if not self._held:
            assert self._region is not None
            self._region.take()
        self._held = True


def reserve(size: int, device: torch.device) -> Region | None:
    """A region with its memory taken; None where the device offers none.

    Raises:
        EngineError: there is not enough memory.
    """
    if device.type != "cuda" or not size or _driver(_index(device)) is None:
        return None
    return _Mapped(size, _index(device))


def lasting_bytes(device: torch.device) -> int:
    """The bytes of the device that regions of this process hold now."""
    return sum(mapping.mapped for mapping in MAPPINGS if mapping.device == _index(device))


class _Mapped:
    """See `Region`."""

    def __init__(self, size: int, device: int) -> None:
        driver = _driver(device)
        assert driver is not None
        self._mapping = Mapping(driver, size, device)
        self.take()
        self.buffer = torch.as_tensor(self._mapping, device=torch.device("cuda", device))[:size]

    def give_back(self) -> None:
        torch.cuda.synchronize(self._mapping.device)
        self._mapping.unmap()

    def take(self) -> None:
        """See `Region`. PyTorch's allocator first returns what it keeps for later."""
        if torch.cuda.mem_get_info(self._mapping.device)[0] < self._mapping.size + CHUNK // 4:
            torch.cuda.empty_cache()
        try:
            self._mapping.map()
        except DriverError as error:
            free = torch.cuda.mem_get_info(self._mapping.device)[0]
            raise EngineError(
                "the memory that the rollout engine may take is not free",
                field="actor_rollout_ref.rollout.gpu_memory_utilization",
                got=f"{free / 2**20:,.1f} MiB free; {error}",
                expected=f"{self._mapping.size / 2**20:,.1f} MiB",
                remedy="lower it, or end what else uses the memory",
            ) from error


@cache
def _driver(device: int) -> Driver | None:
    """The driver of that device, tried out; None, after a warning, where it cannot do what is needed."""
    try:
        driver = Driver(ctypes.CDLL("libcuda.so.1"))
        torch.zeros(1, device=torch.device("cuda", device))  # makes the context
        _try(driver, device)
    except (OSError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        warnings.warn(
            "CUDA graphs are captured anew after each sleep, because this device's memory cannot be given "
            f"back and keep its addresses: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return driver


def _try(driver: Driver, device: int) -> None:
    """Writes to memory, gives it back, takes it again and writes and reads there.

    Raises:
        RuntimeError: that does not work.
    """
    mapping = Mapping(driver, 1, device)
    mapping.map()
    buffer = torch.as_tensor(mapping, device=torch.device("cuda", device))
    buffer.fill_(1)
    for value in (2, 3):
        torch.cuda.synchronize(device)
        mapping.unmap()
        mapping.map()
        buffer.fill_(value)
        total = int(buffer.sum(dtype=torch.int64))
        if buffer.data_ptr() != mapping.address or total != value * mapping.size:
            raise DriverError(f"{total} was read where {value * mapping.size} was written")


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _size(shape: Sequence[int], dtype: torch.dtype) -> int:
    return int(torch.Size(shape).numel()) * dtype.itemsize
