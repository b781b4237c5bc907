"""Host memory for tensors that are offloaded from a device between updates.

The memory is allocated once and never freed. If the device is a GPU, the memory is page-locked. One buffer
contains many tensors. So the tensors are transferred in a few large copies, at the speed of the bus, on a
separate stream. CUDA events make the computation wait for the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from tandem.engines.weight_sync import Packing
from tandem.models.activation_offload import SameStream, SideStream
from tandem.models.collectives import Meter
from tandem.models.tensor_group import joined

_BUFFER_BYTES = 1 << 30  # size of a buffer, unless one tensor needs more; larger buffers are hard to allocate
_ALIGNMENT = 256  # alignment of a tensor within its buffer, in bytes


def leaves(value: Any) -> list[Tensor]:
    """Return the plain tensors of which a tensor subclass consists.

    For a DTensor, this is the rank's shard. For an 8-bit tensor, these are the codes and the scales.
    """
    if isinstance(value, DTensor):
        return leaves(value._local_tensor)
    if not is_traceable_wrapper_subclass(value):
        return [value]
    return [leaf for name in value.__tensor_flatten__()[0] for leaf in leaves(getattr(value, name))]


def remade(value: Any, parts: Iterator[Tensor]) -> Tensor:
    """Rebuild a tensor like `value` from new plain tensors.

    Args:
        value: the tensor to rebuild.
        parts: an iterator over plain tensors, in the order of `leaves`. As many are taken as `leaves(value)`
            has.
    """
    if isinstance(value, DTensor):
        return joined(remade(value._local_tensor, parts), value._spec)
    if not is_traceable_wrapper_subclass(value):
        return next(parts)
    made: Any = transform_subclass
    found: Tensor = made(value, lambda name, part: remade(part, parts))
    return found


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of tensors in buffers, for given dtypes and shapes.

    Attributes:
        kinds: the dtype and shape of each tensor.
        places: for each tensor, the index of its buffer and its start in that buffer, in elements.
        buffers: for each buffer, its dtype and its number of elements.
    """

    kinds: list[tuple[torch.dtype, torch.Size]]
    places: list[tuple[int, int]]
    buffers: list[tuple[torch.dtype, int]]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], limit: int) -> _Layout:
        places: list[tuple[int, int]] = []
        buffers: list[tuple[torch.dtype, int]] = []
        packings: dict[torch.dtype, Packing] = {}
        last: dict[torch.dtype, int] = {}  # dtype → the index of the buffer that is being filled
        for tensor in tensors:
            dtype = tensor.dtype
            size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            begins, start = packings.setdefault(dtype, Packing(limit)).place(size)
            if begins:
                last[dtype] = len(buffers)
                buffers.append((dtype, 0))
            places.append((last[dtype], start // tensor.itemsize))
            buffers[last[dtype]] = dtype, (start + size) // tensor.itemsize
        return cls([(tensor.dtype, tensor.shape) for tensor in tensors], places, buffers)

    def views(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors as views of buffers with this layout."""
        return [
            buffers[number][start : start + shape.numel()].view(shape)
            for (number, start), (_, shape) in zip(self.places, self.kinds, strict=True)
        ]

    def pairs(self, buffers: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the copies that fill the buffers, as pairs (target, source) of tensors.

        If all tensors of a buffer are already in one buffer of the same layout, the whole buffer is one pair.
        Otherwise each tensor is one pair.
        """
        views, found = self.views(buffers), []
        for number, buffer in enumerate(buffers):
            mine = [index for index, place in enumerate(self.places) if place[0] == number]
            whole = self._whole(number, {self.places[index][1]: tensors[index] for index in mine})
            apart = [(views[index], tensors[index]) for index in mine]
            found += apart if whole is None else [(buffer, whole)]
        return found

    def _whole(self, number: int, tensors: Mapping[int, Tensor]) -> Tensor | None:
        """Return the buffer that contains exactly these tensors, or None if there is none.

        Args:
            number: index of the buffer in the layout.
            tensors: a dict from the start in the buffer to the tensor.
        """
        (dtype, size), first = self.buffers[number], next(iter(tensors.values()))
        storage = first.untyped_storage()
        if storage.nbytes() != size * dtype.itemsize:
            return None
        for start, tensor in tensors.items():
            shares = tensor.untyped_storage().data_ptr() == storage.data_ptr()
            if not shares or tensor.storage_offset() != start:
                return None
        return torch.empty(0, dtype=dtype, device=first.device).set_(storage, 0, (size,), (1,))


class HostStore:
    """Host memory to which a fixed set of device tensors is offloaded.

    Args:
        device: the device that computes with the tensors.
        limit: size in bytes of a buffer that holds several tensors.

    Attributes:
        buffers: the host buffers. Empty before the first offload.
        holds: whether the tensors are currently on the host.
    """

    def __init__(self, device: torch.device, *, limit: int = _BUFFER_BYTES) -> None:
        self.buffers: list[Tensor] = []
        self.holds = False
        self._device, self._limit = device, limit
        self._layout: _Layout | None = None
        self._cuda = device.type == "cuda"
        self._lane = SideStream(device) if self._cuda else SameStream()
        self._taken = {"offload": Meter(), "onload": Meter()}

    def offload(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors to host memory, wait for the copies, and return the host tensors.

        The device memory is freed as soon as no other object refers to the old tensors. The tensors may be
        DTensors or other tensor subclasses.
        """
        return self._moved(values, there=True)

    def onload(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Copy the tensors back and return the device tensors. Later computation waits for the copies."""
        return self._moved(values, there=False)

    def _moved(self, values: Sequence[Tensor], *, there: bool) -> list[Tensor]:
        tensors = [leaf for value in values for leaf in leaves(value)]
        layout, buffers = self._laid_out(tensors), self.buffers
        if not there:
            buffers = [torch.empty(size, dtype=dtype, device=self._device) for dtype, size in layout.buffers]
        pairs, taken = layout.pairs(buffers, tensors), self._taken["offload" if there else "onload"]
        nbytes = sum(source.nbytes for _, source in pairs)
        mark = self._lane.start(pairs, taken.measure(self._device, nbytes))
        self._lane.wait(mark)
        if there and self._cuda:
            mark.synchronize()  # after this, the host may read the tensors
        self.holds = there
        parts = iter(layout.views(buffers))
        return [remade(value, parts) for value in values]

    def take(self) -> dict[str, tuple[float, int]]:
        """Return a dict from "offload" and "onload" to seconds and bytes since the last call."""
        return {name: taken.take() for name, taken in self._taken.items()}

    def _laid_out(self, tensors: Sequence[Tensor]) -> _Layout:
        kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if self._layout is None or self._layout.kinds != kinds:
            self._layout = _Layout.of(tensors, self._limit)
            self.buffers = [
                torch.empty(size, dtype=dtype, pin_memory=self._cuda) for dtype, size in self._layout.buffers
            ]
        return self._layout
