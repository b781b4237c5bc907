"""A fake of the parts of vLLM's server for new weights and memory. Its workers hold plain tensors."""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from torch import Tensor

from tandem.engines.rollout.http.channel import Group
from tandem.engines.weight_sync import digest
from tests.engines.rollout.http.fakes import FakeServer, Reply


class FakeVLLM(FakeServer):
    """A fake whose workers all hold the same weights. A sleeping server does not sleep again.

    `files` are the real files behind the paths through which weights came. `received` has, for each bucket
    from the network, how many workers got the same bytes.
    """

    workers = 1
    generates = "/inference/v1/generate"

    def __init__(self, held: dict[str, Tensor], **options: Any) -> None:
        self.held = held
        self.files: list[str] = []
        self.received: list[int] = []
        self.calls: list[str] = []
        self.asleep: set[str] = set()
        super().__init__(**options)

    def answer(self, path: str, body: Any, fault: str) -> Reply:
        parts = urlsplit(path)
        if parts.path == "/collective_rpc":
            self.calls.append(body["method"])
            return Reply({"results": [getattr(self, f"_{body['method']}")(*body["args"])] * self.workers})
        if parts.path == "/sleep" and not self.asleep:
            self.asleep = {"weights", "kv_cache"}
        if parts.path == "/wake_up":
            self.asleep -= set(parse_qs(parts.query)["tags"])
        return Reply({})

    def _tandem_load(self, path: str, size: int, layout: Any) -> None:
        self.files.append(os.readlink(path))
        self._take(torch.from_file(path, shared=True, size=size, dtype=torch.uint8), layout)

    def _take(self, shared: Tensor, layout: Any) -> None:
        for name, kind, shape, offset in layout:
            dtype = getattr(torch, kind)
            end = offset + math.prod(shape) * dtype.itemsize
            self.held[name].copy_(shared[offset:end].view(dtype).view(shape))

    def _tandem_device(self) -> str:
        return "cpu"

    def _tandem_join(self, address: str, port: int, backend: Any) -> None:
        self.groups = self._of_each(lambda worker: Group.joined(address, port, backend, worker, self.workers))

    def _tandem_receive(self, size: int, layout: Any) -> None:
        buckets = [torch.empty(size, dtype=torch.uint8) for _ in range(self.workers)]
        self._of_each(lambda worker: self.groups[worker].broadcast(buckets[worker]).wait())
        self.received.append(sum(torch.equal(bucket, buckets[0]) for bucket in buckets))
        self._take(buckets[-1], layout)

    def _of_each(self, call: Callable[[int], Any]) -> list[Any]:
        """Return the result of the call for each worker. The calls run at the same time."""
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(call, range(self.workers)))

    def _tandem_digest(self) -> dict[str, str]:
        return {name: str(value) for name, value in digest(self.held.items()).items()}
