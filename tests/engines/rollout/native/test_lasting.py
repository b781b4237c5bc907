import ctypes
import gc

import pytest
import torch

from tandem.engines.rollout.native import driver as module
from tandem.engines.rollout.native import lasting
from tandem.engines.rollout.native.driver import MAPPINGS, Driver, DriverError, Mapping
from tandem.engines.rollout.native.lasting import Lasting, lasting_bytes
from tests.engines.rollout.case import CPU
from tests.support.refusing import refused

GRAIN, FIRST = 2**21, 0x7000_0000_0000
OUT_OF_MEMORY, INVALID = 2, 1
NUMBERS = (ctypes.c_uint64, ctypes.c_size_t, ctypes.c_ulonglong)


class Library:
    """A fake of the driver functions that can fail. `room` are its bytes; it records what is mapped."""

    def __init__(self, room):
        self.room = room
        self.reserved, self.handles, self.mapped, self.readable = {}, {}, {}, set()
        self._released = {}  # by handle, whether only its mapping holds it
        self._of = {}  # the handle of each mapping

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args):
            """Call the fake with the plain numbers that the declared types make of the arguments."""
            typed = zip(call.argtypes, args, strict=True)
            args = [kind(arg) if kind in NUMBERS and isinstance(arg, int) else arg for kind, arg in typed]
            args = [arg if hasattr(arg, "_obj") else getattr(arg, "value", arg) for arg in args]
            return getattr(type(self), f"_{name}")(self, *args) or 0

        return call

    def used(self):
        return sum(self.handles.values())

    def _cuMemGetAllocationGranularity(self, out, properties, option):
        self._check(properties._obj)
        out._obj.value = GRAIN

    def _check(self, properties):
        assert (properties.type, properties.handle_types) == (1, 0)
        assert (properties.location.type, properties.location.id) == (1, 3)
        assert not any(properties.flags) and not properties.meta_data

    def _cuMemAddressReserve(self, out, size, alignment, address, flags):
        assert size % GRAIN == 0 and (alignment, address, flags) == (0, 0, 0)
        out._obj.value = FIRST + sum(self.reserved.values())
        self.reserved[out._obj.value] = size

    def _cuMemAddressFree(self, address, size):
        assert self.reserved.pop(address) == size
        assert not any(address <= place < address + size for place in self.mapped)

    def _cuMemCreate(self, out, size, properties, flags):
        self._check(properties._obj)
        if size % GRAIN or self.used() + size > self.room:
            return INVALID if size % GRAIN else OUT_OF_MEMORY
        handle = out._obj.value = 1 + len(self._released)
        self.handles[handle], self._released[handle] = size, False

    def _cuMemMap(self, address, size, offset, handle, flags):
        assert self.handles[handle] == size and (offset, flags) == (0, 0)
        assert any(first <= address and address + size <= first + n for first, n in self.reserved.items())
        assert not any(place < address + size and address < place + n for place, n in self.mapped.items())
        self.mapped[address], self._of[address] = size, handle

    def _cuMemRelease(self, handle):
        assert not self._released[handle]
        self._released[handle] = True
        if handle not in self._of.values():
            del self.handles[handle]

    def _cuMemUnmap(self, address, size):
        assert self.mapped.pop(address) == size
        self.readable.discard(address)
        handle = self._of.pop(address)
        if self._released[handle]:
            del self.handles[handle]

    def _cuMemSetAccess(self, address, size, access, count):
        assert self.mapped[address] == size and count == 1
        assert (access._obj.location.type, access._obj.location.id, access._obj.flags) == (1, 3, 3)
        self.readable.add(address)


@pytest.fixture
def library(monkeypatch):
    """Return a driver with memory for eight chunks of two grains. A deleted mapping waits for no device."""
    monkeypatch.setattr(module, "CHUNK", 2 * GRAIN)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return Library(16 * GRAIN)


def test_memory_comes_back_behind_the_same_addresses(library):
    mapping, mine = Mapping(Driver(library), 5 * GRAIN - 7, 3), torch.device("cuda", 3)
    assert library.reserved == {mapping.address: 5 * GRAIN} and mapping.size == 5 * GRAIN
    assert library.used() == mapping.mapped == 0
    places = {mapping.address + 2 * part * GRAIN: (2, 2, 1)[part] * GRAIN for part in range(3)}
    for _ in range(3):
        mapping.map()
        assert library.mapped == places and library.readable == set(places)
        assert library.used() == lasting_bytes(mine) == 5 * GRAIN
        assert lasting_bytes(torch.device("cuda", 1)) == 0
        mapping.unmap()
        assert library.used() == mapping.mapped == lasting_bytes(mine) == 0
    interface = mapping.__cuda_array_interface__
    assert interface["data"] == (mapping.address, False) and interface["shape"] == (5 * GRAIN,)
    assert interface["typestr"] == "|u1"


def test_where_memory_does_not_suffice_or_has_no_access_none_is_taken(library, monkeypatch):
    one, other = (Mapping(Driver(library), 9 * GRAIN, 3) for _ in range(2))
    one.map()
    refused(DriverError, other.map, f"cuMemCreate failed with status {OUT_OF_MEMORY}")
    assert library.used() == 9 * GRAIN and other.mapped == 0
    one.unmap()
    other.map()
    assert library.used() == 9 * GRAIN
    other.unmap()
    monkeypatch.setattr(Library, "_cuMemSetAccess", lambda *_: INVALID)
    refused(DriverError, one.map, "cuMemSetAccess")
    assert library.used() == 0 and not library.mapped
    refused(AttributeError, lambda: Driver(ctypes.CDLL(None)))  # a library without these functions


def test_a_mapping_that_nobody_has_is_returned(library):
    mapping = Mapping(Driver(library), 3 * GRAIN, 3)
    mapping.map()
    assert mapping in MAPPINGS
    del mapping
    gc.collect()
    assert library.used() == 0 and not library.reserved and not library.mapped


def test_structures_are_laid_out_as_the_drivers():
    assert ctypes.sizeof(module._Properties) == 32 and ctypes.sizeof(module._Access) == 12
    assert (module._Properties.location.offset, module._Properties.flags.offset) == (8, 24)


def test_tensors_side_by_side_in_one_memory():
    specs = [((3, 5), torch.bfloat16), ((7,), torch.float32), ((2, 2, 2), torch.float64), ((0,), torch.int32)]
    held = Lasting(specs, CPU)
    assert not held.stays  # a CPU has no such memory
    for value, ((shape, dtype), tensor) in enumerate(zip(specs, held.tensors, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype) and tensor.is_contiguous()
        assert (tensor.data_ptr() - held.tensors[0].data_ptr()) % 256 == 0 or not tensor.numel()
        tensor.fill_(value)
    assert all(bool((tensor == value).all()) for value, tensor in enumerate(held.tensors))
    assert held.bytes == 3 * 256


def test_a_device_that_cannot_is_told_once(monkeypatch):
    lasting._driver.cache_clear()
    monkeypatch.setattr(lasting.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError("no libcuda")))
    try:
        with pytest.warns(RuntimeWarning, match="after each sleep.*no libcuda"):
            assert lasting.reserve(8, torch.device("cuda", 5)) is None
        assert lasting.reserve(8, torch.device("cuda", 5)) is None
    finally:
        lasting._driver.cache_clear()
