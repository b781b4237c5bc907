"""Offloading of activations to host memory between the forward pass and the backward pass.

When a layer has run, the tensors that it saved for its backward pass are copied to the host. Just before the
backward pass needs the tensors, they are copied back. Whole storages are copied instead of tensors. So a
storage that a layer saved twice, or in two views, is copied only once.

The copies of one layer run in parallel with the computation of the next layer. So the device holds the saved
tensors of two layers at a time. The host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from tandem.models.attention import is_packed
from tandem.models.tensor_group import joined
from tandem.observability.metrics import Metrics

# Smaller storages stay on the device: starting a copy would take longer than the copy itself.
MIN_BYTES = 1 << 14
_ALIGNMENT = 64  # alignment of each storage in host memory, in bytes
_NOTHING = nullcontext()


class SameStream:
    """A copier on the stream of the computation. Later computation waits for the copies."""

    def start(
        self, pairs: Sequence[tuple[Tensor, Tensor]], around: AbstractContextManager[None] = _NOTHING
    ) -> Any:
        """Start to copy sources to targets, after all computation that was launched so far.

        Args:
            pairs: Pairs (target, source) of tensors.
            around: a context manager that is active while the copies are launched.

        Returns:
            A mark of the end of the copies, such as a CUDA event, for `wait`.
        """
        with around:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def wait(self, mark: Any) -> None:
        """Make later computation wait for the mark. On the same stream no action is needed."""


class SideStream(SameStream):
    """A copier on a separate CUDA stream, in parallel with the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(
        self, pairs: Sequence[tuple[Tensor, Tensor]], around: AbstractContextManager[None] = _NOTHING
    ) -> Any:
        """Start to copy; see `SameStream.start`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            super().start(pairs, around)
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Make later computation wait for the mark; see `SameStream.wait`."""
        torch.cuda.current_stream(self._device).wait_event(mark)


@dataclass(slots=True, eq=False)
class _Saved:
    """A storage that a layer saved for its backward pass.

    Attributes:
        nbytes: size in bytes.
        storage: the storage on the device; None while the data are only on the host.
        host: (nbytes) uint8, the copy on the host.
    """

    nbytes: int
    storage: torch.UntypedStorage | None
    host: Tensor | None = None


@dataclass(slots=True, eq=False)
class _Layer:
    """The tensors that a layer saved in one forward pass.

    Attributes:
        index: number of the layer.
        outside: addresses of storages that do not belong to the layer's activations: parameters and tensors
            that all layers share.
        saved: a dict from address to each storage that may be moved.
        small: a dict from address to the size in bytes of each storage that is too small to move.
        mark: the mark of the last copies, if the computation has not waited for it yet; else None.
        over: whether the layer's micro-batch has ended.
    """

    index: int
    outside: frozenset[int]
    saved: dict[int, _Saved] = field(default_factory=dict)
    small: dict[int, int] = field(default_factory=dict)
    mark: Any = None
    over: bool = False

    @property
    def nbytes(self) -> int:
        """The total size in bytes of the storages that may be moved."""
        return sum(saved.nbytes for saved in self.saved.values())

    def send(self, lane: SameStream, memory: Tensor) -> None:
        """Start to copy all storages to `memory`, a byte tensor on the host."""
        pairs, start = [], 0
        for saved in self.saved.values():
            assert saved.storage is not None
            saved.host = memory[start : start + saved.nbytes]
            pairs.append((saved.host, _bytes(saved.storage)))
            start += _aligned(saved.nbytes)
        self.mark = lane.start(pairs)

    def fetch(self, lane: SameStream, device: torch.device) -> None:
        """Start to copy every storage that is only on the host back to the device.

        The device memory is allocated and freed on the stream of the computation. So the allocator does not
        need to know about the copies.
        """
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
        """Make the computation wait for the copies that were started."""
        if self.mark is not None:
            lane.wait(self.mark)
            self.mark = None

    def leave(self, lane: SameStream) -> None:
        """Free the device memory of the storages after their copies have ended."""
        self.settle(lane)
        for saved in self.saved.values():
            saved.storage = None


@dataclass(frozen=True, slots=True, eq=False)
class _Handle:
    """The object that autograd stores instead of a saved tensor.

    If `spec` is given, the tensor is a DTensor, and only this rank's local tensor is moved.
    """

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
    """A wrapper around a model's layers that moves saved activations to the host and back.

    The constructor wraps the `forward` of the layers in place. Without gradients the layers run unchanged.
    After each forward pass, run the backward pass and call `report` before the next forward pass starts.

    These saved tensors stay on the device:

    - parameters.
    - tensors that all layers share: keyword arguments of the layer, such as positions and the mask.
    - small tensors.
    - all tensors of the last layer, because the backward pass starts there.
    - outputs of operators that gradient checkpointing keeps.

    A layer with gradient checkpointing saves only its input and these outputs.

    Args:
        layers: the layers in the order in which they run.
        device: the device on which they run.
        lane: the copier. With None, nothing is copied, and the bytes are only counted. Use None on a CPU,
            where a copy would only go from host memory to host memory.
        ahead: 1: a layer is copied while the adjacent layer computes, so the device holds the saved tensors
            of two layers. 0: the device holds the saved tensors of only one layer.
        min_bytes: smaller storages stay on the device.
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
        self._memory: dict[int, Tensor] = {}  # host memory per layer, reused in every step
        self._layers: list[_Layer] = []
        self._reached: _Layer | None = None
        for index, layer in enumerate(layers):
            wrapped: Any = layer
            wrapped.forward = partial(self._forward, index, layer, wrapped.forward)

    def report(self, metrics: Metrics) -> None:
        """End a micro-batch after its backward pass, and add the metrics of the micro-batch.

        `activation_offload_bytes` counts the bytes that left the device (or would have left it).
        `activation_resident_bytes` is the peak of the saved bytes that stayed on the device.
        """
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
        saved = _Layer(index, frozenset(outside(layer, kwargs)))
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
        part = part_of(tensor)
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
        if (
            layer is not self._reached
        ):  # the backward pass has finished the later layers and needs the earlier layer next
            assert lane is not None
            if layer.over:
                raise EngineError(
                    "the activations of this forward pass were already freed",
                    expected="the backward pass before the next forward pass and before `report`",
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


def outside(layer: nn.Module, kwargs: Mapping[str, Any]) -> set[int]:
    """Return the addresses of the storages that are not activations of the layer.

    Call this inside FSDP's hooks, where the layer's parameters are gathered.
    """
    shared = [*layer.parameters(), *layer.buffers()]
    for leaf in tree_leaves(kwargs):
        if isinstance(leaf, Tensor):
            shared.append(leaf)
        elif is_packed(leaf):
            shared += leaf.tokens.tensors
    return {part_of(tensor).untyped_storage().data_ptr() for tensor in shared}


def part_of(tensor: Tensor) -> Tensor:
    """Return the tensor whose storage has the data.

    For a DTensor this is the local tensor. For the pending result of a collective it is the finished result.
    Any other tensor is returned unchanged.
    """
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
