"""Channels that send weights to a server's workers in buckets, through shared memory or over the network.

Over the network, the trainer and the server's workers form a separate process group.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol
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
BUCKET_BYTES = 256 << 20
"""The bytes of a bucket of weights, unless an engine gets another number."""

_ALIGNMENT = 64
_LIMIT_S = 120.0  # the time limit to form the group, and for a bucket to arrive
_PAUSE_S = 0.002
GROUP_NAME = "tandem-weights"


@dataclass(frozen=True, slots=True)
class Network:
    """The device and the torch.distributed backend for weights that are sent over the network.

    If `backend` is None, nccl is used between GPUs, else gloo.
    """

    device: torch.device
    backend: Backend | None = None


class Channel(Protocol):
    """An open channel for the weights of one version."""

    def room(self, size: int) -> Tensor:
        """Return memory for packed weights, (size) uint8. It is used again for each bucket."""

    def send(self, used: int, layout: Layout) -> None:
        """Send the first `used` bytes. The server has loaded them when this returns."""


def send(
    tensors: Iterable[tuple[str, Tensor]], bucket: Channel, bucket_bytes: int
) -> Iterator[tuple[str, Tensor]]:
    """Pack tensors into buckets, send the buckets, and yield the names and tensors.

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
        yield name, tensor
    if layout:
        bucket.send(used, layout)


def unpacked(bucket: Tensor, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and a view of each tensor that `send` has packed into a bucket."""
    for name, kind, shape, offset in layout:
        dtype: torch.dtype = getattr(torch, kind)
        size = math.prod(shape) * dtype.itemsize
        yield name, bucket[offset : offset + size].view(dtype).view(shape)


class Group:
    """A process group of the trainer (rank 0) and a server's workers (ranks from 1).

    Args:
        store: A store to which all are connected. No other group uses its keys.
        rank: The rank of this process.
        size: The number of processes.
        backend: The torch.distributed backend.
        address: The address of this machine, to which the other processes connect.
    """

    def __init__(self, store: Any, rank: int, size: int, backend: Backend, address: str) -> None:
        self._store = store  # keeps the store alive as long as the group
        limit = timedelta(seconds=_LIMIT_S)
        if backend == "nccl":
            options = _DIST.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group: Any = _DIST.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = _DIST.ProcessGroupGloo._Options()
            options._timeout = limit
            options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=address)]
            self._group = _DIST.ProcessGroupGloo(store, rank, size, options)

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
        return cls(
            _DIST.PrefixStore(GROUP_NAME, store), 1 + worker, 1 + workers, backend, own_address(address, port)
        )

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


class Workers(Protocol):
    """The workers of a server, as the other side of a `NetworkChannel`."""

    def devices(self) -> Sequence[str]:
        """Return the type of each worker's device, such as "cpu"."""

    def prefixes(self, backend: Backend) -> Sequence[str]:
        """Return the prefixes of the group's keys in the store, the outermost first."""

    def join(self, address: str, port: int, backend: Backend) -> Future[Any]:
        """Ask the workers to join the group whose store is at this address. Its ranks start at 1."""

    def receive(self, used: int, layout: Layout) -> Future[Any]:
        """Ask the workers to receive and load a bucket of `used` bytes."""

    def pieces(self, bucket: Tensor, used: int, layout: Layout) -> Sequence[Tensor]:
        """Return the tensors that the workers receive for a bucket, in order."""


class NetworkChannel:
    """A channel to a server anywhere, over the network.

    Args:
        url: The server's URL.
        workers: The server's workers.
        device: The device of the weights.
        backend: The torch.distributed backend. None means nccl between GPUs, else gloo.
    """

    def __init__(
        self, url: str, workers: Workers, *, device: torch.device, backend: Backend | None = None
    ) -> None:
        self._url, self._workers, self._device, self._backend = url, workers, device, backend
        self._group: Group | None = None
        self._abandoned: list[tuple[Group, list[Work]]] = []

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
        self._abandoned = [(group, work) for group, work in self._abandoned if not _completed(work)]
        kinds = self._workers.devices()
        on_gpus = {*kinds, self._device.type} == {"cuda"}
        backend = self._backend or ("nccl" if on_gpus else "gloo")
        size = 1 + len(kinds)
        host = urlsplit(self._url).hostname or ""
        try:
            address = own_address(host, urlsplit(self._url).port or 80)
            limit = timedelta(seconds=_LIMIT_S)
            store = _DIST.TCPStore(address, 0, size, is_master=True, timeout=limit, wait_for_workers=False)
            answer = self._workers.join(address, store.port, backend)
            for prefix in self._workers.prefixes(backend):
                store = _DIST.PrefixStore(prefix, store)
            group = Group(store, 0, size, backend, address)
            answer.result(_LIMIT_S)
        except EngineError:
            raise
        except (OSError, RuntimeError, TimeoutError) as error:
            raise _lost(self._url, error) from error
        return group

    def room(self, size: int) -> Tensor:
        self._bucket = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._bucket

    def send(self, used: int, layout: Layout) -> None:
        assert self._group is not None  # the channel is open
        answer = self._workers.receive(used, layout)
        work = [self._group.broadcast(piece) for piece in self._workers.pieces(self._bucket, used, layout)]
        try:
            until = time.monotonic() + _LIMIT_S
            while not _completed(work) and time.monotonic() < until:
                if wait([answer], _PAUSE_S).done:
                    answer.result()  # raises if the server refused; otherwise the last bytes are being sent
                    time.sleep(_PAUSE_S)
            for piece in work:
                piece.wait()
            answer.result()
        except EngineError:
            raise
        except RuntimeError as error:
            raise _lost(self._url, error) from error
        finally:
            if not _completed(work):  # destroying the group would wait for a broadcast that nobody receives
                self._abandoned.append((self._group, work))


def _completed(work: Sequence[Work]) -> bool:
    return all(piece.is_completed() for piece in work)


def _lost(url: str, error: BaseException) -> ServerLost:
    lines = str(error).strip().splitlines()
    return ServerLost(
        "the weights did not reach the server",
        got=f"{url}: {lines[0] if lines else type(error).__name__}",
        remedy="check the server's log; each of the two machines must be able to connect to the other",
    )
