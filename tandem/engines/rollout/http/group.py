"""An engine of several ranks that share one server."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tandem.engines.rollout.base import SLEEP_TAGS, RolloutEngine, SleepTag, WeightSource, WeightStream
from tandem.engines.rollout.http.client import HTTPEngine
from tandem.engines.weight_sync import Digest
from tandem.errors import ConfigError, EngineError
from tandem.protocol import Request, Sample

T = TypeVar("T")


class GroupEngine:
    """A `RolloutEngine` of a group of ranks, whose first rank has a server on the devices of all ranks.

    All ranks call the same methods in the same order and get the same results and errors. The first rank does
    the work. The other ranks only take part in gathering the weights.

    Args:
        group: The process group.
        device: The device of this rank.
        start: A function that starts the server and creates its engine, from the names of the devices of all
            ranks (see `device_name`). It runs on the first rank.

    Raises:
        ConfigError: The ranks are on several machines.
        EngineError: The server could not be started. See also `start`.
    """

    takes = frozenset({WeightStream})

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, start: Callable[[Sequence[str]], HTTPEngine]
    ) -> None:
        self._group = group
        self._leads = dist.get_rank(group) == 0
        places: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(places, (socket.gethostname(), device_name(device)), group=group)
        hosts, names = zip(*places, strict=True)
        if len(set(hosts)) > 1:
            raise ConfigError(
                "a server that a worker starts can only use the devices of one machine",
                field="actor_rollout_ref.rollout.tensor_model_parallel_size",
                got=f"{len(hosts)}, on {', '.join(sorted(set(hosts)))}",
                expected="a divisor of trainer.n_gpus_per_node",
                remedy="use fewer devices per layer; the other devices then generate other samples",
            )
        self._engine: RolloutEngine | None = None
        self._pending: set[tuple[str, int]] = set()
        self._progress = 0

        def started() -> None:
            self._engine = start(names)

        self._led("start", started)

    def _led(self, what: str, act: Callable[[], T]) -> T:
        """Call the function on the first rank, and return its result or raise its error on all ranks."""
        outcome: list[Any] = [None]
        if self._leads:
            try:
                outcome = [(what, act(), None)]
            except Exception as error:  # every rank raises it, this one too
                outcome = [(what, None, error)]
        dist.broadcast_object_list(outcome, group=self._group, group_src=0)
        done, result, failed = outcome[0]
        if done != what:
            raise EngineError("the group's first rank has stopped", got=done, expected=what)
        if failed is not None:
            raise failed
        return result  # type: ignore[no-any-return]

    @property
    def _own(self) -> RolloutEngine:
        assert self._engine is not None  # only the first rank asks for it
        return self._engine

    def submit(self, requests: Sequence[Request]) -> None:
        self._led("submit", lambda: self._own.submit(requests))
        self._pending.update(request.id for request in requests)

    def poll(self, timeout_s: float) -> list[Sample]:
        def polled() -> tuple[list[Sample], int]:
            return self._own.poll(timeout_s), self._own.progress()

        samples, self._progress = self._led("poll", polled)
        self._pending.difference_update(sample.id for sample in samples)
        return samples

    def pending(self) -> int:
        return len(self._pending)

    def abort(self, ids: Sequence[tuple[str, int]], *, keep_partial: bool = False) -> list[Sample]:
        partial = self._led("abort", lambda: self._own.abort(ids, keep_partial=keep_partial))
        self._pending.difference_update(ids)
        return partial

    def update_weights(self, source: WeightSource, version: int) -> Digest:
        stream = HTTPEngine.stream_of(source)

        def updated() -> Digest:
            try:
                return self._own.update_weights(stream, version)
            finally:  # gathering is collective, so an error must not end it on one rank alone
                _drain(stream)

        if not self._leads:
            _drain(stream)
        return self._led("update_weights", updated)

    def sleep(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        self._led("sleep", lambda: self._own.sleep(tags))

    def wake(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        self._led("wake", lambda: self._own.wake(tags))

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def progress(self) -> int:
        return self._progress

    def stats(self) -> dict[str, float]:
        """Return the counters on the first rank, and nothing on the other ranks."""
        return {} if self._engine is None else self._engine.stats()


def _drain(stream: WeightStream) -> None:
    for _ in stream.tensors:
        pass


def device_name(device: torch.device) -> str:
    """Return the name of a device in CUDA_VISIBLE_DEVICES, or "cpu"."""
    if device.type == "cpu":
        return "cpu"
    index, visible = device.index or 0, os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[index].strip() if visible else str(index)
