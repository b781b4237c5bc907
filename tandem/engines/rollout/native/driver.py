"""Bindings to the CUDA driver's virtual memory management.

Addresses are reserved once. Physical memory is mapped to these addresses only while it is needed
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html).
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch

CHUNK = 2**30  # the approximate number of bytes of physical memory that are mapped at a time
_DEVICE_MEMORY, _READ_WRITE, _PINNED = 1, 3, 1  # CU_MEM_LOCATION_TYPE_, CU_MEM_ACCESS_FLAGS_PROT_, ..._TYPE_


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Properties(ctypes.Structure):
    """The C struct CUmemAllocationProp. Fields without a name here stay zero."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


_POINTER, _SIZE, _FLAGS = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_ulonglong
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemGetAllocationGranularity": (ctypes.POINTER(_SIZE), ctypes.POINTER(_Properties), ctypes.c_int),
    "cuMemAddressReserve": (ctypes.POINTER(_POINTER), _SIZE, _SIZE, _POINTER, _FLAGS),
    "cuMemAddressFree": (_POINTER, _SIZE),
    "cuMemCreate": (ctypes.POINTER(_POINTER), _SIZE, ctypes.POINTER(_Properties), _FLAGS),
    "cuMemRelease": (_POINTER,),
    "cuMemMap": (_POINTER, _SIZE, _SIZE, _POINTER, _FLAGS),
    "cuMemUnmap": (_POINTER, _SIZE),
    "cuMemSetAccess": (_POINTER, _SIZE, ctypes.POINTER(_Access), _SIZE),
}


class DriverError(RuntimeError):
    """The error when a call of the CUDA driver fails."""


class Driver:
    """The functions of the CUDA driver's virtual memory management.

    Args:
        library: The loaded library libcuda.

    Raises:
        AttributeError: The library does not have these functions.
    """

    def __init__(self, library: Any) -> None:
        self._functions = {name: getattr(library, name) for name in _SIGNATURES}
        for name, types in _SIGNATURES.items():
            self._functions[name].argtypes, self._functions[name].restype = types, ctypes.c_int

    def call(self, name: str, *args: Any) -> None:
        """Call a driver function.

        Args:
            name: The function's name.
            args: Its arguments.

        Raises:
            DriverError: The call failed.
        """
        status = self._functions[name](*args)
        if status:
            raise DriverError(f"{name} failed with status {status}")


class Mapping:
    """Reserved addresses and the physical memory mapped to them. PyTorch's tensors keep this object alive.

    Args:
        driver: The driver.
        size: The number of bytes, which is rounded up to the driver's granularity.
        device: The device's number.

    Attributes:
        device: The device's number.
        size: The number of reserved bytes.
        address: The first reserved address.
        mapped: The number of bytes of physical memory that are mapped now.
    """

    def __init__(self, driver: Driver, size: int, device: int) -> None:
        self.device, self.mapped = device, 0
        self._driver = driver
        self._location = _Location(_DEVICE_MEMORY, device)
        self._properties = _Properties(type=_PINNED, location=self._location)
        grain, address = _SIZE(), _POINTER()
        driver.call("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(self._properties), 0)
        self._chunk = -(-CHUNK // grain.value) * grain.value
        self.size = -(-size // grain.value) * grain.value
        driver.call("cuMemAddressReserve", ctypes.byref(address), self.size, 0, 0, 0)
        self.address = address.value
        # This does not run at the end of the process. The driver may be unloaded then, and it frees all
        # memory itself.
        weakref.finalize(
            self, _freed, driver, self.address, self.size, chunks := list[tuple[int, int]]()
        ).atexit = False
        self._chunks = chunks
        MAPPINGS.add(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        place = (self.address, False)  # False: not read-only
        return {"shape": (self.size,), "typestr": "|u1", "data": place, "strides": None, "version": 3}

    def map(self) -> None:
        """Map physical memory to all reserved addresses.

        Raises:
            DriverError: There is not enough memory. Then nothing is mapped.
        """
        try:
            while self.mapped < self.size:
                place, size = self.address + self.mapped, min(self._chunk, self.size - self.mapped)
                self._map(place, size)
                self._chunks.append((place, size))
                self.mapped += size
        except DriverError:
            self.unmap()
            raise

    def _map(self, address: int, size: int) -> None:
        """Map new physical memory to some reserved addresses. Unmapping frees the memory.

        If this function fails, nothing is mapped.
        """
        call, handle, access = self._driver.call, _POINTER(), _Access(self._location, _READ_WRITE)
        call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), 0)
        try:
            call("cuMemMap", address, size, 0, handle, 0)
        finally:
            call("cuMemRelease", handle)  # now only the mapping keeps the memory allocated
        try:
            call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
        except DriverError:
            call("cuMemUnmap", address, size)
            raise

    def unmap(self) -> None:
        _unmap(self._driver, self._chunks)
        self.mapped = 0


MAPPINGS: weakref.WeakSet[Mapping] = weakref.WeakSet()


def _unmap(driver: Driver, chunks: list[tuple[int, int]]) -> None:
    while chunks:
        driver.call("cuMemUnmap", *chunks.pop())


def _freed(driver: Driver, address: int, size: int, chunks: list[tuple[int, int]]) -> None:
    torch.cuda.synchronize()  # launched kernels may still read the memory
    _unmap(driver, chunks)
    driver.call("cuMemAddressFree", address, size)
