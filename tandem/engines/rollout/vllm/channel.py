"""Channels that send weights to vLLM's workers in buckets, through shared memory or over the network.

Over the network, the trainer and the server's workers form a separate process group.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from torch import Tensor, distributed
from torch.distributed import Work

from tandem.engines.rollout.http.connection import ServerLost
from tandem.engines.weight_sync import Packing
from tandem.errors import EngineError

Layout = list[tuple[str, str, list[int], int]]
"""(name, dtype, shape, offset in bytes) of each tensor in a bucket."""

Backend = Literal["gloo", "nccl"]
_DIST: Any = distributed  # torch's type stubs lack the classes of process groups
_ALIGNMENT = 64
_LIMIT_S = 120.0  # the time limit to form the group, and for a bucket to arrive
_PAUSE_S = 0.002
_NAME = "tandem-weights"


def send(tensors: Iterable[tuple[str, Tensor]], bucket: Channel, bucket_bytes: int) -> Iterator[str]:
    """Pack tensors into buckets, send the buckets, and yield the tensors' names.

    Args:
        tensors: Pairs of name and tensor. Each tensor is valid only until the next one is requested.
        bucket: The channel, which must be open.
        bucket_bytes: The bytes of a bucket. A larger tensor gets its own bucket.
    """
    packing = Packing(bucket_bytes, alignment=_ALIGNMENT)
    layout: Layout = []
    used = size = 0
    for name, tensor in tensors:
        begins, start = packing.place(tensor.nbytes)
        if begins:
            if layout:
                bucket.send(used, layout)
            layout = []
            if tensor.nbytes > size:
                size = max(bucket_bytes, tensor.nbytes)
                room = bucket.room(size)
        used = start + tensor.nbytes
        room[start:used].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        layout.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start))
        yield name
    if layout:
        bucket.send(used, layout)


def unpacked(bucket: Tensor, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and a view of each tensor that `send` has packed into a bucket."""
    for name, kind, shape, offset in layout:
        dtype: torch.dtype = getattr(torch, kind)
        size = math.prod(shape) * dtype.itemsize
        yield name, bucket[offset : offset + size].view(dtype).view(shape)


class MemoryChannel:
    """A channel to a server on this machine, through shared memory.

    Args:
        call: A function that calls a method of the server's workers with arguments.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    @contextmanager
    def opened(self) -> Iterator[MemoryChannel]:
        """Open the channel for the weights of one version."""
        self._file = os.memfd_create(_NAME)  # this file has no path, so it disappears with this process
        self._path = f"/proc/{os.getpid()}/fd/{self._file}"
        try:
            yield self
        finally:
            os.close(self._file)

    def room(self, size: int) -> Tensor:
        """Return the memory of a bucket, (size) uint8. All buckets share this memory."""
        os.truncate(self._file, size)
        self._size = size
        return torch.from_file(self._path, shared=True, size=size, dtype=torch.uint8)

    def send(self, used: int, layout: Layout) -> None:
        """Send the first `used` bytes of the bucket, and wait until the server has loaded the weights."""
        self._call("tandem_load", self._path, self._size, layout)


class Group:
    """A process group of the trainer (rank 0) and a server's workers (ranks from 1).

    Args:
        store: The TCPStore to which all processes are connected.
        rank: The rank of this process.
        size: The number of processes.
        backend: The torch.distributed backend.
        address: The address of this machine, to which the other processes connect.
    """

    def __init__(self, store: Any, rank: int, size: int, backend: Backend, address: str) -> None:
        self._store = store  # keeps the store alive as long as the group
        named, limit = _DIST.PrefixStore(_NAME, store), timedelta(seconds=_LIMIT_S)
        if backend == "nccl":
            options = _DIST.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group: Any = _DIST.ProcessGroupNCCL(named, rank, size, options)
        else:
            options = _DIST.ProcessGroupGloo._Options()
            options._timeout = limit
            options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=address)]
            self._group = _DIST.ProcessGroupGloo(named, rank, size, options)

    @classmethod
    def joined(cls, address: str, port: int, backend: Backend, worker: int = 0, workers: int = 1) -> Group:
        """Join the group as a worker.

        Args:
            address: The address of the trainer's store.
            port: The port of the trainer's store.
            backend: The torch.distributed backend.
            worker: The number of this worker, from 0.
            workers: The number of workers.
        """
        limit = timedelta(seconds=_LIMIT_S)
        store = _DIST.TCPStore(address, port, 1 + workers, is_master=False, timeout=limit)
        return cls(store, 1 + worker, 1 + workers, backend, own_address(address, port))

    def broadcast(self, bucket: Tensor) -> Work:
        """Start to broadcast a bucket from the trainer to the workers, and return the running operation."""
        work: Work = self._group.broadcast(bucket, 0)
        return work


def own_address(host: str, port: int) -> str:
    """Return the address under which the host reaches this machine.

    Raises:
        OSError: The host does not exist, or there is no route to it.
    """
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # connecting a UDP socket sends nothing
        return str(probe.getsockname()[0])


class NetworkChannel:
    """A channel to a server anywhere, over the network.

    Args:
        url: The server's URL.
        begin: A function that starts a call of a method of the server's workers. The future has a list of
            each worker's answer.
        device: The device of the weights.
        backend: The torch.distributed backend. None means nccl between GPUs, else gloo.
    """

    def __init__(
        self,
        url: str,
        begin: Callable[..., Future[Any]],
        *,
        device: torch.device,
        backend: Backend | None = None,
    ) -> None:
        self._url, self._begin, self._device, self._backend = url, begin, device, backend
        self._group: Group | None = None
        self._abandoned: list[tuple[Group, Work]] = []

    @contextmanager
    def opened(self) -> Iterator[NetworkChannel]:
        """Open the channel for the weights of one version. The first call forms the process group.

        Raises:
            ServerLost: The server cannot be reached, or is lost.
        """
        try:
            if self._group is None:
                self._group = self._join()
            yield self
        except BaseException:  # trainer and workers may be at different buckets
            self._group = None
            raise

    def _join(self) -> Group:
        self._abandoned = [(group, work) for group, work in self._abandoned if not work.is_completed()]
        kinds = self._begin("tandem_device").result()
        on_gpus = {*kinds, self._device.type} == {"cuda"}
        backend = self._backend or ("nccl" if on_gpus else "gloo")
        size = 1 + len(kinds)
        host = urlsplit(self._url).hostname or ""
        try:
            address = own_address(host, urlsplit(self._url).port or 80)
            limit = timedelta(seconds=_LIMIT_S)
            store = _DIST.TCPStore(address, 0, size, is_master=True, timeout=limit, wait_for_workers=False)
            answer = self._begin("tandem_join", address, store.port, backend)
            group = Group(store, 0, size, backend, address)
            answer.result(_LIMIT_S)
        except EngineError:
            raise
        except (OSError, RuntimeError, TimeoutError) as error:
            raise _lost(self._url, error) from error
        return group

    def room(self, size: int) -> Tensor:
        """Return the memory of a bucket (see `MemoryChannel`)."""
        self._bucket = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._bucket

    def send(self, used: int, layout: Layout) -> None:
        """Start to send the first `used` bytes of the bucket."""
        assert self._group is not None  # the channel is open
        answer = self._begin("tandem_receive", used, layout)
        work = self._group.broadcast(self._bucket[:used])
        try:
            until = time.monotonic() + _LIMIT_S
            while not work.is_completed() and time.monotonic() < until:
                if wait([answer], _PAUSE_S).done:
                    answer.result()  # raises if the server refused; otherwise the last bytes are being sent
                    time.sleep(_PAUSE_S)
            work.wait()
            answer.result()
        except EngineError:
            raise
        except RuntimeError as error:
            raise _lost(self._url, error) from error
        finally:
            if (
                not work.is_completed()
            ):  # destroying the group would wait for a broadcast that nobody receives
                self._abandoned.append((self._group, work))


Channel = MemoryChannel | NetworkChannel


def _lost(url: str, error: BaseException) -> ServerLost:
    lines = str(error).strip().splitlines()
    return ServerLost(
        "the weights did not reach the server",
        got=f"{url}: {lines[0] if lines else type(error).__name__}",
        remedy="check the server's log; each of the two machines must be able to connect to the other",
    )
