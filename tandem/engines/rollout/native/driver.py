"""The CUDA driver's virtual memory management: addresses are reserved once, and physical memory is mapped
behind them while it is held (https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html)."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch

CHUNK = 2**30  # bytes of physical memory that are mapped at a time, about
_DEVICE_MEMORY, _READ_WRITE, _PINNED = 1, 3, 1  # CU_MEM_LOCATION_TYPE_, CU_MEM_ACCESS_FLAGS_PROT_, ..._TYPE_


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp; what is not named here stays zero."""

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
    """A call of the driver failed."""


class Driver:
    """The driver's virtual memory management.

    Args:
        library: libcuda.

    Raises:
        AttributeError: a library without these functions.
    """

    def __init__(self, library: Any) -> None:
        self._functions = {name: getattr(library, name) for name in _SIGNATURES}
        for name, types in _SIGNATURES.items():
            self._functions[name].argtypes, self._functions[name].restype = types, ctypes.c_int

    def call(self, name: str, *args: Any) -> None:
        """
        Raises:
            RuntimeError: the call failed.
        """
        status = self._functions[name](*args)
        if status:
            raise DriverError(f"{name} failed with status {status}")

    def granularity(self, device: int) -> int:
        """Bytes of which every mapping is a multiple."""
        out = _SIZE()
        self.call("cuMemGetAllocationGranularity", ctypes.byref(out), ctypes.byref(_properties(device)), 0)
        return out.value

    def reserve(self, size: int) -> int:
        """The first of `size` addresses that nothing else gets."""
        out = _POINTER()
        self.call("cuMemAddressReserve", ctypes.byref(out), size, 0, 0, 0)
        return out.value

    def map(self, address: int, size: int, device: int) -> None:
        """Puts memory behind reserved addresses; unmapping returns it. If it fails nothing is mapped."""
        handle, access = _POINTER(), _Access(_Location(_DEVICE_MEMORY, device), _READ_WRITE)
        self.call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(_properties(device)), 0)
        try:
            self.call("cuMemMap", address, size, 0, handle, 0)
        finally:
            self.call("cuMemRelease", handle)  # the mapping alone holds it now
        try:
            self.call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
        except DriverError:
            self.call("cuMemUnmap", address, size)
            raise


def _properties(device: int) -> _Properties:
    return _Properties(type=_PINNED, location=_Location(_DEVICE_MEMORY, device))


class Mapping:
    """Reserved addresses and the memory behind them. PyTorch's tensors keep it alive.

    Attributes:
        device: its number.
        mapped: bytes of memory behind the addresses now.
    """

    def __init__(self, driver: Driver, size: int, device: int) -> None:
        self.device, self.mapped = device, 0
        grain = driver.granularity(device)
        self._chunk = -(-CHUNK // grain) * grain
        self.size = -(-size // grain) * grain
        self._driver = driver
        self.address = driver.reserve(self.size)
        # Not at the process's end, when the driver may be gone and returns everything itself.
        weakref.finalize(
            self, _freed, driver, self.address, self.size, chunks := list[tuple[int, int]]()
        ).atexit = False
        self._chunks = chunks
        MAPPINGS.add(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def map(self) -> None:
        """
        Raises:
            RuntimeError: there is not enough memory; nothing is mapped then.
        """
        try:
            while self.mapped < self.size:
                place, size = self.address + self.mapped, min(self._chunk, self.size - self.mapped)
                self._driver.map(place, size, self.device)
                self._chunks.append((place, size))
                self.mapped += size
        except DriverError:
            self.unmap()
            raise

    def unmap(self) -> None:
        _unmap(self._driver, self._chunks)
        self.mapped = 0


MAPPINGS: weakref.WeakSet[Mapping] = weakref.WeakSet()


def _unmap(driver: Driver, chunks: list[tuple[int, int]]) -> None:
    while chunks:
        driver.call("cuMemUnmap", *chunks.pop())


def _freed(driver: Driver, address: int, size: int, chunks: list[tuple[int, int]]) -> None:
    torch.cuda.synchronize()  # what was launched may still read there
    _unmap(driver, chunks)
    driver.call("cuMemAddressFree", address, size)
