"""Device memory that is given back and taken again at the same addresses, so that the CUDA graphs which read
and write there stay good. PyTorch's allocator hands out other addresses each time, and does not count this
memory; see `lasting_bytes`."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from functools import cache

import torch

from tandem.engines.rollout.native.driver import CHUNK, MAPPINGS, Driver, DriverError, Mapping
from tandem.errors import EngineError

_ALIGNMENT = 256  # bytes, of each tensor

Spec = tuple[Sequence[int], torch.dtype]
"""Shape and type of a tensor."""


class Region:
    """Bytes at fixed addresses of a CUDA device. Make one by `reserve`.

    Attributes:
        buffer: uint8, all of them; it must not be touched between `give_back` and `take`.
    """

    def __init__(self, size: int, driver: Driver, device: int) -> None:
        self._mapping = Mapping(driver, size, device)
        self.take()
        self.buffer = torch.as_tensor(self._mapping, device=torch.device("cuda", device))[:size]

    def give_back(self) -> None:
        """Return the memory, and what stood there with it, once the device has done all it was asked."""
        torch.cuda.synchronize(self._mapping.device)
        self._mapping.unmap()

    def take(self) -> None:
        """Take memory again, of whatever content. PyTorch's allocator first returns what it keeps for later.

        Raises:
            EngineError: there is not enough.
        """
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
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in specs]
        rounded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        self.bytes = sum(rounded)
        self._region = region = reserve(self.bytes, device)
        self.stays = region is not None
        self._held = True
        whole = region.buffer if region else torch.empty(self.bytes, dtype=torch.uint8, device=device)
        self.tensors = [
            piece[:size].view(dtype).view(tuple(shape))
            for piece, size, (shape, dtype) in zip(torch.split(whole, rounded), sizes, specs, strict=True)
        ]

    def give_back(self) -> bool:
        """Return the memory if it is such as stays.

        Returns:
            Whether it is, and can be taken again.
        """
        if self._region is not None and self._held:
            self._region.give_back()
            self._held = False
        return self.stays

    def take(self) -> None:
        """Take the memory again if it was given back.

        Raises:
            EngineError: there is not enough.
        """
        if not self._held:
            assert self._region is not None
            self._region.take()
        self._held = True


def reserve(size: int, device: torch.device) -> Region | None:
    """Return a region with its memory taken; None where the device offers none.

    Raises:
        EngineError: there is not enough memory.
    """
    if device.type != "cuda" or not size:
        return None
    driver = _driver(_index(device))
    return None if driver is None else Region(size, driver, _index(device))


def lasting_bytes(device: torch.device) -> int:
    """Return how many bytes of the device regions of this process hold now."""
    return sum(mapping.mapped for mapping in MAPPINGS if mapping.device == _index(device))


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
    """Write to memory, give it back, take it again, and write and read there.

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
