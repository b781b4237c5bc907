"""The workers of an SGLang server, as the other side of a channel for weights."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from tandem.engines.rollout.http.channel import GROUP_NAME, Backend, Layout, unpacked

Post = Callable[[str, dict[str, Any]], Future[Any]]
"""Starts a POST request with a path and a JSON object. The future has the server's answer."""

_SHARING: Any = torch.multiprocessing  # its functions have no types
_PICKLING = threading.Lock()  # the sharing strategy belongs to the whole process


class SharedMemoryChannel:
    """A channel to a server on this machine: tensors in shared memory (`/update_weights_from_tensor`).

    Args:
        post: See `Post`.
        ranks: The number of ranks that split the server's layers.
    """

    def __init__(self, post: Post, ranks: int) -> None:
        self._post, self._ranks = post, ranks

    @contextmanager
    def opened(self) -> Iterator[SharedMemoryChannel]:
        """Open the channel for the weights of one version."""
        try:
            yield self
        finally:
            self._bucket: Tensor | None = None

    def room(self, size: int) -> Tensor:
        with _shared_by_name():
            bucket: Any = torch.empty(size, dtype=torch.uint8)
            room: Tensor = bucket.share_memory_()
        self._bucket = room
        return room

    def send(self, used: int, layout: Layout) -> None:
        assert self._bucket is not None  # the channel is open
        tensors = list(unpacked(self._bucket, layout))
        # Each rank releases the shared memory once, so each gets its own reference to it.
        handles = [_pickled(tensors) for _ in range(self._ranks)]
        body = {"serialized_named_tensors": handles, "flush_cache": True}
        self._post("/update_weights_from_tensor", body).result()


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share tensors by the name of a file in /dev/shm. The default, a file descriptor, ends the server."""
    with _PICKLING:
        before = _SHARING.get_sharing_strategy()
        _SHARING.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            _SHARING.set_sharing_strategy(before)


def _pickled(tensors: Sequence[tuple[str, Tensor]]) -> str:
    buffer = io.BytesIO()
    with _shared_by_name():
        ForkingPickler(buffer).dump(list(tensors))
    return base64.b64encode(buffer.getvalue()).decode()


class SGLangWorkers:
    """The workers of a server that gets weights over the network.

    Args:
        post: See `Post`.
        device: The type of the server's devices.
        ranks: The number of ranks that split the server's layers.
    """

    def __init__(self, post: Post, device: str, ranks: int) -> None:
        self._post, self._device, self._ranks = post, device, ranks
        self._groups = 0

    def devices(self) -> Sequence[str]:
        return [self._device] * self._ranks

    @property
    def _name(self) -> str:
        return f"{GROUP_NAME}-{self._groups}"

    def prefixes(self, backend: Backend) -> Sequence[str]:
        """Return the prefixes that torch's `_new_process_group_helper` gives to the group on the server."""
        return self._name, f"{self._name}/", "cuda/" if backend == "nccl" else "cpu/"

    def join(self, address: str, port: int, backend: Backend) -> Future[Any]:
        self._groups += 1  # the server keeps a group that is no longer used
        return self._post(
            "/init_weights_update_group",
            {
                "master_address": address,
                "master_port": port,
                "rank_offset": 1,
                "world_size": 1 + self._ranks,
                "group_name": self._name,
                "backend": backend,
            },
        )

    def receive(self, used: int, layout: Layout) -> Future[Any]:
        return self._post(
            "/update_weights_from_distributed",
            {
                "names": [name for name, _, _, _ in layout],
                "dtypes": [dtype for _, dtype, _, _ in layout],
                "shapes": [shape for _, _, shape, _ in layout],
                "group_name": self._name,
                "flush_cache": True,
            },
        )

    def pieces(self, bucket: Tensor, used: int, layout: Layout) -> Sequence[Tensor]:
        return [tensor for _, tensor in unpacked(bucket, layout)]
