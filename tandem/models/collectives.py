"""The cost of a model's collectives: seconds and bytes, counted where they are called.

FSDP2 lets its all-gather and reduce-scatter be replaced; ours are its own with a meter around them.
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

# Pairs of CUDA events kept before those that have passed are read.
_MANY_EVENTS = 1000


class Meter:
    """Adds up the seconds and bytes of operations on this rank.

    Seconds are those spent in the call; on CUDA those between events around it on its own stream, so that it
    may run beside computation.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._bytes = 0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def measure(self, device: torch.device, received: int) -> Iterator[None]:
        """An operation on tensors of `device` in which that many bytes come."""
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
        """Seconds and bytes since the last call; waits for operations still under way on CUDA."""
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
    """Adds up the collectives of one model on this rank.

    Bytes are those this rank receives from others when every piece travels once, of W ranks: in an
    all-gather the W - 1 other shards; in a reduce-scatter the W - 1 other contributions to its own
    shard; an all-reduce is a reduce-scatter and an all-gather, 2 (W - 1) / W of its size. FSDP pads
    shards to equal size, and the padding counts.

    Seconds are those spent in the call, which for a host tensor waits for the slowest rank; on CUDA
    those between events around it on its own stream, so that they may run beside computation.
    """

    def count(self, received: int) -> None:
        """Bytes that came from one other rank; the wait for them is not timed."""
        self._bytes += received

    def all_reduce(
        self,
        tensor: Tensor,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Sums in place over the ranks of `group` or all; does nothing for one."""
        world = dist.get_world_size(group)
        if world > 1:
            with self.measure(tensor.device, all_reduce_bytes(tensor.nbytes, world)):
                dist.all_reduce(tensor, op=op, group=group)

    def total(self, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Return the sum of all ranks' x, the same on all, without gradient."""
        total = x.clone(memory_format=torch.contiguous_format)
        self.all_reduce(total, group=group)
        return total

    def attach(self, unit: FSDPModule) -> None:
        """Counts this unit's all-gathers and reduce-scatters from now on."""
        unit.set_custom_all_gather(_AllGather(self))
        unit.set_custom_reduce_scatter(_ReduceScatter(self))


def exchanged(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `there` of x, whose gradient is `back` of the gradient that comes."""
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
    """The bytes that a rank of `world` receives in an all-reduce of `size` bytes."""
    return 2 * size * (world - 1) // world


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _Counted:
    """A collective of FSDP's, with a meter around it."""

    def __init__(self, meter: CollectiveMeter) -> None:
        self._meter = meter

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **options: Any) -> Any:
        plain: Any = super()
        received = abs(output_tensor.nbytes - input_tensor.nbytes)
        with self._meter.measure(output_tensor.device, received):
            return plain.__call__(output_tensor, input_tensor, *rest, **options)


class _AllGather(_Counted, DefaultAllGather):
    """The other ranks' shards come."""


class _ReduceScatter(_Counted, DefaultReduceScatter):
    """The other ranks' contributions to this one's shard come."""
