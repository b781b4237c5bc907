"""The workers of a vLLM server, as the other side of a channel for weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tandem.engines.rollout.http.channel import GROUP_NAME, Backend, Layout


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
        self._file = os.memfd_create(GROUP_NAME)  # this file has no path, so it disappears with this process
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


class VLLMWorkers:
    """The methods of `worker.WorkerExtension`, called over HTTP.

    Args:
        begin: Starts a call of a method of the workers. The future has each worker's answer.
    """

    def __init__(self, begin: Callable[..., Future[Any]]) -> None:
        self._begin = begin

    def devices(self) -> Sequence[str]:
        kinds: list[str] = self._begin("tandem_device").result()
        return kinds

    def prefixes(self, backend: Backend) -> Sequence[str]:
        return (GROUP_NAME,)

    def join(self, address: str, port: int, backend: Backend) -> Future[Any]:
        return self._begin("tandem_join", address, port, backend)

    def receive(self, used: int, layout: Layout) -> Future[Any]:
        return self._begin("tandem_receive", used, layout)

    def pieces(self, bucket: Tensor, used: int, layout: Layout) -> Sequence[Tensor]:
        return [bucket[:used]]
