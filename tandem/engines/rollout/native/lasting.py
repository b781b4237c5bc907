"""Device memory that can be freed and allocated again at the same addresses.

CUDA graphs that read and write this memory stay valid. PyTorch's allocator would return different addresses
each time. PyTorch's memory statistics do not include this memory (see `lasting_bytes`).
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from functools import cache

import torch

from tandem.engines.rollout.native.driver import CHUNK, MAPPINGS, Driver, DriverError, Mapping
from tandem.errors import EngineError

_ALIGNMENT = 256  # each tensor starts at a multiple of this number of bytes

Spec = tuple[Sequence[int], torch.dtype]
"""The shape and dtype of a tensor."""


class Region:
    """Memory at fixed addresses of a CUDA device. Create it with `reserve`.

    Args:
        size: The number of bytes.
        driver: The bindings to the CUDA driver.
        device: The device's number.

    Attributes:
        buffer: The memory as a uint8 tensor. Do not use this tensor between `give_back` and `take`.
    """

    def __init__(self, size: int, driver: Driver, device: int) -> None:
        self._mapping = Mapping(driver, size, device)
        self.take()
        self.buffer = torch.as_tensor(self._mapping, device=torch.device("cuda", device))[:size]

    def give_back(self) -> None:
        """Wait until the device is idle, then free the memory. The content is lost."""
        torch.cuda.synchronize(self._mapping.device)
        self._mapping.unmap()

    def take(self) -> None:
        """Allocate the memory again. The content is arbitrary.

        If needed, PyTorch's allocator first frees its cached memory.

        Raises:
            EngineError: There is not enough memory.
        """
        if torch.cuda.mem_get_info(self._mapping.device)[0] < self._mapping.size + CHUNK // 4:
            torch.cuda.empty_cache()
        try:
            self._mapping.map()
        except DriverError as error:
            free = torch.cuda.mem_get_info(self._mapping.device)[0]
            raise EngineError(
                "there is not enough free memory for the rollout engine",
                field="actor_rollout_ref.rollout.gpu_memory_utilization",
                got=f"{free / 2**20:,.1f} MiB free; {error}",
                expected=f"{self._mapping.size / 2**20:,.1f} MiB",
                remedy="lower this key, or stop other programs that use the device",
            ) from error


class Lasting:
    """A set of tensors in one block of memory, which keeps its addresses if the device supports a `Region`.

    Args:
        specs: The shapes and dtypes of the tensors.
        device: The device.

    Attributes:
        tensors: The tensors. Their initial content is arbitrary.
        stays: Whether the memory keeps its addresses when it is freed and allocated again.
        bytes: The number of bytes of all tensors together.
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
        """Free the memory if it can be allocated again at the same addresses.

        Returns:
            Whether the memory was freed.
        """
        if self._region is not None and self._held:
            self._region.give_back()
            self._held = False
        return self.stays

    def take(self) -> None:
        """Allocate the memory again if it was freed.

        Raises:
            EngineError: There is not enough memory.
        """
        if not self._held:
            assert self._region is not None
            self._region.take()
        self._held = True


def reserve(size: int, device: torch.device) -> Region | None:
    """Create a region with allocated memory, or return None if the device does not support regions.

    Raises:
        EngineError: There is not enough memory.
    """
    if device.type != "cuda" or not size:
        return None
    driver = _driver(_index(device))
    return None if driver is None else Region(size, driver, _index(device))


def lasting_bytes(device: torch.device) -> int:
    """Return how many bytes of the device's memory the regions of this process occupy now."""
    return sum(mapping.mapped for mapping in MAPPINGS if mapping.device == _index(device))


@cache
def _driver(device: int) -> Driver | None:
    """Return the tested driver bindings of this device, or warn and return None if the test fails."""
    try:
        driver = Driver(ctypes.CDLL("libcuda.so.1"))
        torch.zeros(1, device=torch.device("cuda", device))  # creates the CUDA context
        _try(driver, device)
    except (OSError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        warnings.warn(
            "CUDA graphs are captured again after each sleep, because this device cannot free memory and "
            f"keep its addresses: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return driver


def _try(driver: Driver, device: int) -> None:
    """Test the driver: write to a region, free it, allocate it again, then write and read.

    Raises:
        RuntimeError: The test failed.
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
            raise DriverError(f"read {total} after writing {value * mapping.size}")


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
