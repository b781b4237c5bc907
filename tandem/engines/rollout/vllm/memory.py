"""Memory of a vLLM engine in this process, given back and taken again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from tandem.engines.rollout.base import SLEEP_TAGS, SleepTag


def caches(engine: Any) -> list[Tensor]:
    """One tensor for each storage of the cache."""
    runner = engine.model_executor.driver_worker.worker.model_runner
    return list({cache.untyped_storage()._cdata: cache for cache in runner.kv_caches}.values())


class HostMemory:
    """Storages shrink to nothing and grow again where they are, so that all views of them stay valid."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._released: dict[SleepTag, list[tuple[torch.UntypedStorage, int]]] = {}

    def release(self, tags: Collection[SleepTag]) -> Collection[SleepTag]:
        """Those that sleep now."""
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
                storage.fill_(0)  # type: ignore[attr-defined]  # a cache must be finite where unwritten, too


class DeviceMemory:
    """vLLM's sleep mode, which gives back weights and cache together: level 1 keeps the weights on the host,
    level 2 drops them."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def release(self, tags: Collection[SleepTag]) -> Collection[SleepTag]:
        if self._engine.is_sleeping():  # in part: it would not fall asleep again
            self._engine.wake_up()
        self._engine.sleep(level=2 if "weights" in tags else 1)
        return SLEEP_TAGS

    def restore(self, tags: Collection[SleepTag]) -> None:
        self._engine.wake_up(sorted(tags))
