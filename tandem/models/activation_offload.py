"""Activations that wait for the backward pass in host memory.

What a layer saves for its backward is copied out when the layer has run, and comes back just before it is
needed. Storages are copied, not tensors: what a layer saves twice, or in two views, travels once.

The copies of a layer run beside the computation of the next one: of the device's memory, two layers' worth
is in use. Nothing here makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._pytree import tree_leaves

from tandem.errors import EngineError
from tandem.models.packing import Packing
from tandem.models.tensor_group import joined
from tandem.observability.metrics import Metrics

# Storages of fewer bytes stay: starting their copies would take longer than the copies.
MIN_BYTES = 1 << 14
_ALIGNMENT = 64  # bytes, in host memory
_NOTHING = nullcontext()


class SameStream:
    """Makes copies in the order of the computation, which waits for them."""

    def start(
        self, pairs: Sequence[tuple[Tensor, Tensor]], around: AbstractContextManager[None] = _NOTHING
    ) -> Any:
        """Begins to copy (target, source), once the computation that was issued so far is done.

        Args:
            around: entered for the copies, where they are made.

        Returns:
            A mark of the copies' end.
        """
        with around:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def wait(self, mark: Any) -> None:
        """Makes the computation from now on wait for the mark: here it does so anyway."""


class SideStream(SameStream):
    """Makes copies on a CUDA stream of their own, beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(
        self, pairs: Sequence[tuple[Tensor, Tensor]], around: AbstractContextManager[None] = _NOTHING
    ) -> Any:
        """See `SameStream.start`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            super().start(pairs, around)
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """See `SameStream.wait`."""
        torch.cuda.current_stream(self._device).wait_event(mark)


@dataclass(slots=True, eq=False)
class _Saved:
    """A storage that a layer saved.

    Attributes:
        nbytes: its size.
        storage: on the device; None while it is on the host alone.
        host: (nbytes) uint8, its copy.
    """

    nbytes: int
    storage: torch.UntypedStorage | None
    host: Tensor | None = None


@dataclass(slots=True, eq=False)
class _Layer:
    """The tensors that a layer saved in one forward.

    Attributes:
        index: of the layer.
        outside: storages, by address, that are not the layer's own: parameters, and what all layers share.
        saved: its own by address.
        small: the bytes of those that are too small to move, by address.
        mark: of copies that nobody has waited for yet.
        over: whether the micro-batch has ended.
    """

    index: int
    outside: frozenset[int]
    saved: dict[int, _Saved] = field(default_factory=dict)
    small: dict[int, int] = field(default_factory=dict)
    mark: Any = None
    over: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of all that may move."""
        return sum(saved.nbytes for saved in self.saved.values())

    def send(self, lane: SameStream, memory: Tensor) -> None:
        """Begins to copy everything out into `memory`, bytes on the host."""
        pairs, start = [], 0
        for saved in self.saved.values():
            assert saved.storage is not None
            saved.host = memory[start : start + saved.nbytes]
            pairs.append((saved.host, _bytes(saved.storage)))
            start += _aligned(saved.nbytes)
        self.mark = lane.start(pairs)

    def fetch(self, lane: SameStream, device: torch.device) -> None:
        """Begins to copy back what is on the host alone. The memory is the computation's own, as it is
        freed there: the allocator need not know of the copies."""
        pairs = []
        for saved in self.saved.values():
            if saved.storage is None:
                assert saved.host is not None
                target = torch.empty(saved.nbytes, dtype=torch.uint8, device=device)
                saved.storage = target.untyped_storage()
                pairs.append((target, saved.host))
        if pairs:
            self.mark = lane.start(pairs)

    def settle(self, lane: SameStream) -> None:
        """Computation waits for the copies that were begun."""
        if self.mark is not None:
            lane.wait(self.mark)
            self.mark = None

    def leave(self, lane: SameStream) -> None:
        """Frees the device's memory, once copies from or to it have ended."""
        self.settle(lane)
        for saved in self.saved.values():
            saved.storage = None


@dataclass(frozen=True, slots=True, eq=False)
class _Handle:
    """The stand-in that autograd keeps for a saved tensor. Of one that ranks share, as `spec` says, this
    rank's part is moved."""

    layer: _Layer
    saved: _Saved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    spec: DTensorSpec | None

    def tensor(self) -> Tensor:
        storage = self.saved.storage
        assert storage is not None
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        part = empty.set_(storage, self.offset, self.size, self.stride)
        return part if self.spec is None else joined(part, self.spec)


class ActivationOffload:
    """Moves what layers save for their backward to the host and back. Wraps the layers' forward in place;
    without gradient they run as ever. Each forward through the layers is followed by its backward and by
    `report`, before the next one begins.

    Of each layer's saved tensors those stay that are parameters, that all layers share (what comes to the
    layer by keyword: positions, packing), that are small, and those of the last layer, with which the
    backward begins. A layer under checkpointing saves its input, and what checkpointing keeps besides stays.

    Args:
        layers: in the order in which they run.
        device: where they run.
        lane: makes the copies; None only counts what would be copied, as on a CPU, where it would be copied
            from host memory to host memory.
        ahead: 1: a layer is on its way while its neighbour computes, so that two layers' tensors are on the
            device; 0: one layer's.
        min_bytes: smaller storages stay.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        device: torch.device,
        *,
        lane: SameStream | None,
        ahead: int,
        min_bytes: int = MIN_BYTES,
    ) -> None:
        self._device = device
        self.lane = lane
        self._ahead = ahead
        self.min_bytes = min_bytes
        self._last = len(layers) - 1
        self._memory: dict[int, Tensor] = {}  # a layer's on the host; kept from step to step
        self._layers: list[_Layer] = []
        self._reached: _Layer | None = None
        for index, layer in enumerate(layers):
            wrapped: Any = layer
            wrapped.forward = partial(self._forward, index, layer, wrapped.forward)

    def report(self, metrics: Metrics) -> None:
        """Ends a micro-batch, after its backward. Adds the bytes that left the device (or would have), and
        the most that was left there of what the layers saved."""
        moved = sum(layer.nbytes for layer in self._layers if layer.index < self._last)
        metrics.add_sum("activation_offload_bytes", float(moved))
        most = small = before = 0
        for layer in self._layers:
            small += sum(layer.small.values())
            most = max(most, small + layer.nbytes + before)
            before = layer.nbytes if self._ahead else 0
        metrics.add_max("activation_resident_bytes", float(most))
        self._end()

    def _forward(self, index: int, layer: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if index == 0:
            self._end()
        saved = _Layer(index, frozenset(_outside(layer, kwargs)))
        self._layers.append(saved)
        with saved_tensors_hooks(partial(self._pack, saved), self._unpack):
            out = forward(*args, **kwargs)
        if self.lane is not None:
            if index < self._last:
                needed = sum(_aligned(storage.nbytes) for storage in saved.saved.values())
                memory = self._memory.get(index)
                if memory is None or len(memory) < needed:
                    memory = torch.empty(needed, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
                    self._memory[index] = memory
                saved.send(self.lane, memory)
            if self._ahead <= index < self._last + self._ahead:
                self._layers[index - self._ahead].leave(self.lane)
        return out

    def _pack(self, layer: _Layer, tensor: Tensor) -> Tensor | _Handle:
        part = _part(tensor)
        storage = part.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if tensor.device.type != self._device.type or address in layer.outside:
            return tensor
        if nbytes < self.min_bytes:
            layer.small[address] = nbytes
            return tensor
        if address not in layer.saved:
            layer.saved[address] = _Saved(nbytes, storage if self.lane is not None else None)
        if self.lane is None:
            return tensor
        spec = tensor._spec if isinstance(tensor, DTensor) else None
        shape = part.shape, part.stride(), part.storage_offset()
        return _Handle(layer, layer.saved[address], part.dtype, *shape, spec)

    def _unpack(self, packed: Tensor | _Handle) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        layer, lane = packed.layer, self.lane
        if layer is not self._reached:  # those after it are done with, the one before it is next
            assert lane is not None
            if layer.over:
                raise EngineError(
                    "the activations of this forward are gone",
                    expected="a backward before the next forward, and before the report of the micro-batch",
                )
            self._reached = layer
            for later in self._layers[layer.index + 1 :]:
                later.leave(lane)
            layer.fetch(lane, self._device)
            layer.settle(lane)
            if self._ahead and layer.index > 0:
                self._layers[layer.index - 1].fetch(lane, self._device)
        return packed.tensor()

    def _end(self) -> None:
        for layer in self._layers:
            if self.lane is not None:
                layer.leave(self.lane)
            layer.over = True
        self._layers = []
        self._reached = None


def _outside(layer: nn.Module, kwargs: dict[str, Any]) -> set[int]:
    """Addresses of storages that the layer's own activations do not lie in. Inside FSDP's hooks the
    parameters are the gathered ones."""
    shared = [*layer.parameters(), *layer.buffers()]
    for leaf in tree_leaves(kwargs):
        if isinstance(leaf, Tensor):
            shared.append(leaf)
        elif isinstance(leaf, Packing):
            shared += leaf.tensors
    return {_part(tensor).untyped_storage().data_ptr() for tensor in shared}


def _part(tensor: Tensor) -> Tensor:
    """The tensor itself, but this rank's part of one that ranks share, and the result of a collective once
    it is there: these have no storage of their own."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor.trigger_wait()  # type: ignore[no-untyped-call, no-any-return]
    return tensor


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
