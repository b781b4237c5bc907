"""Classes that free the memory of a vLLM engine in this process and allocate it again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from tandem.engines.rollout.base import SLEEP_TAGS, SleepTag


def caches(engine: Any) -> list[Tensor]:
    """Return one tensor for each distinct storage of the KV cache."""
    runner = engine.model_executor.driver_worker.worker.model_runner
    return list({cache.untyped_storage()._cdata: cache for cache in runner.kv_caches}.values())


class HostMemory:
    """The engine's memory on a CPU. Storages are resized to 0 and back in place, so all views stay valid."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._released: dict[SleepTag, list[tuple[torch.UntypedStorage, int]]] = {}

    def release(self, tags: Collection[SleepTag]) -> Collection[SleepTag]:
        """Free the memory of these tags, and return the tags whose memory is now free."""
        for tag in tags:
            held = caches(self._engine)
            if tag == "weights":
                held = list(self._engine.collective_rpc("get_model")[0].parameters())
            storages = [tensor.untyped_storage() for tensor in held]
            self._released[tag] = [(storage, storage.nbytes()) for storage in storages]
            for storage in storages:
                storage.resize_(0)
        return tags

    def restore(self, tags: Collection[SleepTag]) -> None:
        for tag in tags:
            for storage, size in self._released.pop(tag):
                storage.resize_(size)
                storage.fill_(0)  # type: ignore[attr-defined]  # unwritten parts of a cache must be finite


class DeviceMemory:
    """The engine's memory on a GPU. vLLM's sleep mode frees weights and KV cache together.

    Level 1 of the sleep mode keeps the weights on the host. Level 2 drops the weights.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def release(self, tags: Collection[SleepTag]) -> Collection[SleepTag]:
        if self._engine.is_sleeping():  # a partly sleeping engine would not sleep again
            self._engine.wake_up()
        self._engine.sleep(level=2 if "weights" in tags else 1)
        return SLEEP_TAGS

    def restore(self, tags: Collection[SleepTag]) -> None:
        self._engine.wake_up(sorted(tags))
