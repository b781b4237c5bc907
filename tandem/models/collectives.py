"""Measurement of a model's collectives: their seconds and bytes.

FSDP2 allows you to replace its all-gather and reduce-scatter. Tandem's replacements call FSDP2's operations
and measure each call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

# When more pairs of CUDA events than this are pending, the pairs that have completed are read.
_MANY_EVENTS = 1000


class Meter:
    """A meter that sums the seconds and bytes of operations on this rank.

    On a CPU, the seconds are the time spent in the call. On CUDA, they are the time between two events before
    and after the operation on its stream. So the measured operation may overlap with computation.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._bytes = 0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def measure(self, device: torch.device, received: int) -> Iterator[None]:
        """Measure the operation inside the context, which receives `received` bytes on `device`."""
        self._bytes += received
        if device.type != "cuda":
            start = time.perf_counter()
            try:
                yield
            finally:
                self._seconds += time.perf_counter() - start
            return
        begin, end = _event(), _event()
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))
        if len(self._events) > _MANY_EVENTS:
            self._read(wait=False)

    def take(self) -> tuple[float, int]:
        """Return the seconds and bytes since the last call, and reset both.

        On CUDA this waits for operations that are still running.
        """
        self._read(wait=True)
        taken = self._seconds, self._bytes
        self._seconds, self._bytes = 0.0, 0
        return taken

    def _read(self, *, wait: bool) -> None:
        while self._events:
            begin, end = self._events[0]
            if wait:
                end.synchronize()
            elif not end.query():  # type: ignore[no-untyped-call]
                return
            self._seconds += begin.elapsed_time(end) / 1000
            self._events.popleft()


class CollectiveMeter(Meter):
    """A meter that sums the collectives of one model on this rank.

    The bytes are the bytes that this rank receives from other ranks if every piece is sent once. With W
    ranks, this is:

    - in an all-gather: the W - 1 other shards.
    - in a reduce-scatter: the W - 1 other contributions to this rank's shard.
    - in an all-reduce, which is a reduce-scatter and an all-gather: 2 (W - 1) / W of the tensor's size.

    FSDP pads shards to equal size, and the padding is included.

    The seconds are measured as in `Meter`. For a host tensor they include the wait for the slowest rank.
    """

    def count(self, received: int) -> None:
        """Add bytes that were received from another rank, without measuring the time of the transfer."""
        self._bytes += received

    def all_reduce(
        self,
        tensor: Tensor,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Reduce a tensor in place over the ranks of `group` (None: all ranks).

        With a single rank this does nothing.
        """
        world = dist.get_world_size(group)
        if world > 1:
            with self.measure(tensor.device, all_reduce_bytes(tensor.nbytes, world)):
                dist.all_reduce(tensor, op=op, group=group)

    def total(self, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Return the sum of x over the ranks. All ranks get the same sum, without gradient."""
        total = x.clone(memory_format=torch.contiguous_format)
        self.all_reduce(total, group=group)
        return total

    def attach(self, unit: FSDPModule) -> None:
        """Measure this unit's all-gathers and reduce-scatters from now on."""
        unit.set_custom_all_gather(_AllGather(self))
        unit.set_custom_reduce_scatter(_ReduceScatter(self))


def exchanged(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `there(x)`. In the backward pass, the gradient of x is `back` of the incoming gradient."""
    return _Exchanged.apply(x, there, back)  # type: ignore[no-untyped-call, no-any-return]


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def all_reduce_bytes(size: int, world: int) -> int:
    """Return the bytes that one of `world` ranks receives in an all-reduce of `size` bytes."""
    return 2 * size * (world - 1) // world


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _Counted:
    """A measured collective of FSDP."""

    def __init__(self, meter: CollectiveMeter) -> None:
        self._meter = meter

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **options: Any) -> Any:
        plain: Any = super()
        received = abs(output_tensor.nbytes - input_tensor.nbytes)
        with self._meter.measure(output_tensor.device, received):
            return plain.__call__(output_tensor, input_tensor, *rest, **options)


class _AllGather(_Counted, DefaultAllGather):
    """FSDP's all-gather, measured: this rank receives the shards of the other ranks."""


class _ReduceScatter(_Counted, DefaultReduceScatter):
    """FSDP's reduce-scatter, measured: this rank receives contributions to its shard."""
